"""Products with the Hessian of a loss, by a second backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockopt.measure.closures import check_reached

Vectors = Mapping[str, Tensor]
Product = Callable[[Vectors], Vectors]


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Run uncompiled, with the only attention kernel that has second derivatives.

    See https://github.com/pytorch/pytorch/issues/116350.
    """
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH):
        yield


def hessian_products(
    evaluation: Callable[[], Tensor], parameters: Vectors
) -> tuple[Vectors, Product]:
    """Return the gradient, and `v ↦ H v` for vectors of some or all of the parameters.

    A product is that of the diagonal block of the parameters that its vector has.

    Raises:
        ValueError: If the loss depends on none of the parameters.
    """
    with twice_differentiable():
        found = torch.autograd.grad(
            evaluation(), list(parameters.values()), create_graph=True, allow_unused=True
        )
    check_reached(found)
    gradients = {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(parameters.items(), found)
    }

    def times(vectors: Vectors) -> Vectors:
        pairs = [
            (gradients[name], v) for name, v in vectors.items() if gradients[name].requires_grad
        ]
        if not pairs:
            return {name: torch.zeros_like(v) for name, v in vectors.items()}
        with twice_differentiable():
            products = torch.autograd.grad(
                [gradient for gradient, _ in pairs],
                [parameters[name] for name in vectors],
                [v.to(gradient) for gradient, v in pairs],
                retain_graph=True,
                materialize_grads=True,
            )
        return dict(zip(vectors, products))

    return {name: gradient.detach() for name, gradient in gradients.items()}, times
