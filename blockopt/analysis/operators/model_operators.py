"""Hessian, Gauss-Newton matrix and what lies between them as operators `A @ v`, of a whole model, a parameter or a head.

The loss Hessian splits as `H = G + F`: `G = Jᵀ Λ J`, the Gauss-Newton or outer-product part, with
the Jacobian J of the predictions and the Hessian Λ of the loss in them, and `F = Σ r ∇²f`, the
functional part, with the predictions f and the derivative r of the loss by them.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from blockopt.analysis.operators.parameter_vector import ParameterVector, all_finite
from blockopt.analysis.progress import track
from blockopt.blocks import Blocks
from blockopt.measure.closures import (
    Evaluation,
    Loss,
    Losses,
    batch_means,
    eager_math,
    refuse_sharded,
)
from blockopt.measure.loss_curvature import CaptureLosses, LossCurvature

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on

# Columns of one matrix go through the graph together while their activations have at most this many
# entries: up to six times faster for tiny models, where each operation costs more than its numbers,
# and no faster, only larger, beyond.
ENTRIES_AT_ONCE = 2**24

Product = Callable[[Tensor], Tensor]
Item = TypeVar("Item")


class ModelOperator(ParameterVector, ABC):
    """What the operators of a model share: the vector of parameters with its blocks, and the mean over batches.

    Args:
        model: Any module with whole parameters (not FSDP2), of any dtype. It runs in evaluation
            mode and is left as it was.
        losses: A closure that returns the mean loss of a batch, or that and its number of tokens,
            or several of them; they are averaged by tokens. Each product runs all of them, so what
            is given is kept as a list, a generator too.
        names: The parameters to act on; by default all that are trainable. The others are
            constants.
        blocks: What `find_blocks(model)` returns, for `block` and `blocks`; found there by default.
        progress: Whether to show a bar over the batches of each product; needs rich.
        check_deterministic: Whether to evaluate loss and gradient twice, and raise if they differ.

    Attributes:
        names: The names of the parameters, in the order of `model.named_parameters()`, which is
            that of the vector; each is flattened row-major.
        shape: `(n, n)`.

    Raises:
        ValueError: If a name is wrong, the blocks do not fit, there is no closure, or a parameter
            is sharded.
        TypeError: If a closure is none, or returns no loss.
        RuntimeError: If two evaluations differ.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Losses,
        *,
        names: Iterable[str] | None = None,
        blocks: Mapping[str, Blocks] | None = None,
        progress: bool = False,
        check_deterministic: bool = True,
    ) -> None:
        refuse_sharded(model, type(self).__name__)
        super().__init__(model, names, blocks)
        self._closures = _closures(losses)
        self._progress = progress
        self._kept: _Kept | None = None
        self._at_once: int | None = None
        if check_deterministic:
            self._check_deterministic()

    def __repr__(self) -> str:
        of = self.names[0] if len(self.names) == 1 else f"{len(self.names)} parameters"
        part = "" if self._index is None else f", block {self._index}"
        return f"{type(self).__name__}({self.shape[0]:,} x {self.shape[1]:,}, {of}{part}, batches: {len(self._closures)})"

    def __matmul__(self, v: Tensor) -> Tensor:
        """The product with a vector `(n,)` or the columns of a matrix `(n, k)`, averaged over the batches by tokens.

        Raises:
            TypeError: If `v` is no tensor, or of another dtype.
            ValueError: If its shape or device is wrong, or an entry is not finite.
            FloatingPointError: If the product is not finite.
        """
        self._check_vector(v)
        with torch.inference_mode(False), torch.enable_grad():
            rows = v.detach().reshape(self.shape[0], -1).T.contiguous()  # (k, n)
            group = 1 if len(rows) < 2 else self._columns_at_once()
            graphs: Iterator[Any] = iter(range(len(self._closures)))

            def measure(evaluation: Evaluation) -> dict[str, Tensor]:
                times = self._graph(next(graphs), evaluation)
                products = [times(part) for part in rows.split(group)] if len(rows) else [rows]
                return {"product": products[0] if len(products) == 1 else torch.cat(products)}

            closures = track(
                self._closures, type(self).__name__, self._progress and len(self._closures) > 1
            )
            product = batch_means(self._model, closures, measure)["product"]
        if not all_finite(product):
            raise FloatingPointError(
                f"{self!r} @ v is not finite: the loss has no second derivatives at these weights, as the norm of a zero "
                "vector has none, or they overflow in this dtype. Try model.double()."
            )
        return product.T.reshape(v.shape)

    def _part(self, names: tuple[str, ...], index: int | None, size: int) -> Self:
        part = super()._part(names, index, size)
        part._kept = None
        return part

    @contextmanager
    def keep_graph(self) -> Iterator[None]:
        """Keep the graph of every batch from one product to the next while inside: for many products at the same weights.

        That saves the forward and the first backward pass of each, for the memory of them all, so
        not with many batches. If parameters or buffers have changed, the graphs are made anew. The
        data of the closures must not change.
        """
        if self._kept is not None:
            yield
            return
        self._kept = _Kept()
        try:
            yield
        finally:
            self._kept = None

    @abstractmethod
    def _linearize(
        self, evaluation: Evaluation, parameters: list[Tensor]
    ) -> Callable[[list[Tensor]], list[Tensor]]:
        """Run the batch, and return the map from `(m, *shape)` of each parameter to m products, of the same shapes."""

    def _graph(self, batch: int, evaluation: Evaluation) -> Product:
        """The map from rows `(m, n)` to products, made from the batch or kept."""
        if self._kept is not None and batch == 0:
            self._kept.forget_if_changed(self._model)
        if self._kept is not None and batch in self._kept.graphs:
            evaluation.tokens, times = self._kept.graphs[batch]
            return times
        with eager_math():
            apply = self._linearize(evaluation, list(self._parameters().values()))

        def product(rows: Tensor) -> Tensor:
            with eager_math():
                return self._flatten(apply(self._unflatten(rows)))

        if self._kept is not None:
            self._kept.graphs[batch] = (evaluation.tokens, product)
        return product

    def _check_deterministic(self) -> None:
        used, narrow = False, None

        def measure(shift: bool, evaluation: Evaluation) -> dict[str, Tensor]:
            parameters = list(self._parameters().values())
            if shift:  # every evaluation starts from the caller's random state, which will be another one the next time
                for device in {p.device for p in parameters}:
                    torch.rand((), device=device)
            with eager_math():
                loss = evaluation()
                reached = torch.autograd.grad(loss, parameters, allow_unused=True)
            nonlocal used, narrow
            used = used or any(g is not None for g in reached)
            narrow = narrow or (
                torch.finfo(loss.dtype).eps > torch.finfo(self.dtype).eps and loss.dtype
            )
            gradients = [
                torch.zeros_like(p) if g is None else g for p, g in zip(parameters, reached)
            ]
            return {
                "loss": loss.reshape(1, 1),
                "gradient": self._flatten([g.unsqueeze(0) for g in gradients]),
            }

        with torch.inference_mode(False):
            first = batch_means(
                self._model, self._closures, lambda evaluation: measure(False, evaluation)
            )
            second = batch_means(
                self._model, self._closures, lambda evaluation: measure(True, evaluation)
            )
        if not used:
            raise ValueError(
                f"The loss depends on none of the {len(self.names)} parameters, {self.names[0]!r} first. Is it the loss of "
                "another model, such as a copy?"
            )
        if narrow:
            warnings.warn(
                f"The loss is of {narrow}, the parameters of {self.dtype}: products have the precision of the loss. "
                "transformers computes its loss in float32; F.cross_entropy(model(...).logits, ...) keeps that of the model.",
                stacklevel=3,
            )
        for what in ("loss", "gradient"):
            error, size = float((first[what] - second[what]).norm()), float(first[what].norm())
            if not error <= torch.finfo(first[what].dtype).eps ** 0.5 * size:
                raise RuntimeError(
                    f"The losses are not deterministic: the {what} of two evaluations differs by {error:.3g}, its size is "
                    f"{size:.3g}. Every product must see the same batches: draw them once, outside of the closures, as in "
                    "`batch = next(batches)` and `lambda: model(**batch).loss`; and no dropout outside of modules, which "
                    "evaluation mode does not switch off. check_deterministic=False skips this check."
                )

    def _columns_at_once(self) -> int:
        """So many that their activations have `ENTRIES_AT_ONCE` entries; counted in a forward pass of the first batch."""
        if self._at_once is None:
            counter = _CountEntries()

            def measure(evaluation: Evaluation) -> dict[str, Tensor]:
                with eager_math(), counter:
                    return {"loss": evaluation()}

            batch_means(self._model, self._closures[0], measure)
            self._at_once = max(1, ENTRIES_AT_ONCE // max(counter.total, self.shape[0]))
        return self._at_once

    def _pull(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], vectors: Sequence[Tensor]
    ) -> list[Tensor]:
        """`Σ vectorᵀ ∂output/∂input` for each input and each of the m leading entries of the vectors."""
        number = len(vectors[0])
        pairs = [
            (output, vector) for output, vector in zip(outputs, vectors) if output.requires_grad
        ]
        zeros = [x.new_zeros(1).expand(number, *x.shape) for x in inputs]
        if not pairs:
            return zeros
        reached = [output for output, _ in pairs]

        def pulled(along: list[Tensor], batched: bool) -> Any:
            options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": batched}
            return torch.autograd.grad(reached, inputs, along, **options)  # type: ignore[arg-type]

        found = None
        if number > 1:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", "There is a performance drop")
                    found = pulled([vector for _, vector in pairs], True)
            except (
                RuntimeError,
                UserWarning,
            ):  # an operation without a rule for batches of vectors
                self._at_once = 1
        if found is None:
            each = [pulled([vector[i] for _, vector in pairs], False) for i in range(number)]
            found = [None if parts[0] is None else torch.stack(parts) for parts in zip(*each)]
        return [zero if product is None else product for zero, product in zip(zeros, found)]

    def _second_derivative(
        self, value: Tensor, parameters: list[Tensor]
    ) -> Callable[[list[Tensor]], list[Tensor]]:
        """`v ↦ ∇² value v`, by a second backward pass."""
        gradients = torch.autograd.grad(
            value, parameters, create_graph=True, materialize_grads=True
        )
        return lambda vectors: self._pull(gradients, parameters, vectors)


class HessianOperator(ModelOperator):
    """The Hessian H of the loss: exact products by a second backward pass. Any loss. Arguments as for `ModelOperator`.

    Attention runs on the math kernel, the only one with second derivatives, and compiled models run
    eagerly. Reverse over reverse, not `torch.func.hessian` or `jvp` of `jacrev`: those give wrong
    numbers for LayerNorm with a weight, without an error (torch 2.13; `jacfwd` of `grad` is right).

    Example:
        Loss `(3 w1 + 4 w2)²`:

        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> H = HessianOperator(model, lambda: model(x).square().sum())
        >>> H @ torch.tensor([1.0, 0.0])
        tensor([18., 24.])
    """

    def _linearize(
        self, evaluation: Evaluation, parameters: list[Tensor]
    ) -> Callable[[list[Tensor]], list[Tensor]]:
        return self._second_derivative(evaluation(), parameters)


class GaussNewtonOperator(ModelOperator):
    """The Gauss-Newton matrix `G = Jᵀ Λ J`, the outer-product part of the Hessian. Arguments as for `ModelOperator`.

    Λ is the Hessian of the loss in the predictions, in closed form: the loss must call
    `F.cross_entropy`, `F.mse_loss` or `F.binary_cross_entropy_with_logits`, with any of their
    options. No matrix of vocabulary times vocabulary is built. What else the loss holds has no part
    in G: it belongs to `FunctionalOperator`, and there is a warning if it is over 1 %.

    Example:
        Squared error of one output, loss `(3 w1 + 4 w2)²`, which is linear in the weights: G is the
        Hessian.

        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> G = GaussNewtonOperator(model, lambda: nn.functional.mse_loss(model(x), torch.zeros(1, 1)))
        >>> G @ torch.tensor([1.0, 0.0])
        tensor([18., 24.])
    """

    def _linearize(
        self, evaluation: Evaluation, parameters: list[Tensor]
    ) -> Callable[[list[Tensor]], list[Tensor]]:
        with CaptureLosses() as seen:
            loss = evaluation()
        curvature = LossCurvature(loss, seen.calls)
        predictions = curvature.predictions
        # Jᵀ u is linear in u, so that its derivative by u along v is J v, at any u.
        duals = [torch.zeros_like(prediction, requires_grad=True) for prediction in predictions]
        options = {"create_graph": True, "materialize_grads": True}
        backward = torch.autograd.grad(predictions, parameters, duals, **options)  # type: ignore[arg-type]

        def apply(vectors: list[Tensor]) -> list[Tensor]:
            forward = self._pull(backward, duals, vectors)
            return self._pull(predictions, parameters, torch.vmap(curvature.product)(forward))

        return apply


class FunctionalOperator(ModelOperator):
    """The functional part `F = H - G = Σ r ∇²f` of the Hessian. Arguments as for `ModelOperator`, losses as for G.

    Not the difference of two products, which would lose all digits where F is far smaller than H:
    one second derivative of the loss with its cross-entropy or squared error made linear in the
    predictions f.

    Example:
        Loss `(w1 w2)²` at w = (1, 2), with the Hessian ((8, 8), (8, 2)) and the Gauss-Newton matrix
        ((8, 4), (4, 2)):

        >>> model = nn.ParameterList([torch.tensor(1.0), torch.tensor(2.0)])
        >>> F = FunctionalOperator(model, lambda: nn.functional.mse_loss(model[0] * model[1], torch.tensor(0.0)))
        >>> F @ torch.eye(2)
        tensor([[0., 4.],
                [4., 0.]])
    """

    def _linearize(
        self, evaluation: Evaluation, parameters: list[Tensor]
    ) -> Callable[[list[Tensor]], list[Tensor]]:
        with CaptureLosses() as seen:
            loss = evaluation()
        return self._second_derivative(
            loss + LossCurvature(loss, seen.calls).residual(), parameters
        )


class _Kept:
    """Graphs by batch, with the parameters and buffers that they were made with."""

    def __init__(self) -> None:
        self.graphs: dict[int, tuple[float | None, Product]] = {}
        self._state: list[Tensor] = []
        self._copies: list[Tensor] = []

    def forget_if_changed(self, model: nn.Module) -> None:
        """Compare entry by entry: an assignment through `.data` does not count versions."""
        state = [*model.parameters(), *model.buffers()]
        same = len(state) == len(self._state) and all(
            new is old and new.dtype == saved.dtype and torch.equal(new, saved)
            for new, old, saved in zip(state, self._state, self._copies)
        )
        if not same:
            self.graphs.clear()
            self._state, self._copies = state, [tensor.detach().clone() for tensor in state]


class _CountEntries(TorchDispatchMode):
    """Counts the entries of all that is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            self.total += tensor.numel() if isinstance(tensor, Tensor) else 0
        return result


def _closures(losses: Losses) -> list[Loss]:
    if isinstance(losses, Tensor):
        raise TypeError(
            "Invalid losses: a tensor. Must be a closure that computes it, such as `lambda: model(**batch).loss`."
        )
    closures: list[Any] = [losses] if callable(losses) else list(losses)
    if not closures:
        raise ValueError("Invalid losses: no closure. Must be one or more.")
    wrong = next((closure for closure in closures if not callable(closure)), None)
    if wrong is not None:
        raise TypeError(
            f"Invalid losses: one is of type {type(wrong).__name__}. Must be closures such as `lambda: model(**batch).loss`, "
            "or, for several batches, `[functools.partial(loss_of, batch) for batch in batches]`."
        )
    return closures
