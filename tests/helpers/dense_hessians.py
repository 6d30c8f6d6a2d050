"""Exact curvature by autograd, entry by entry, and a small transformer to judge estimators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockopt import find_blocks
from blockopt.curvature import analytic
from blockopt.measure.loss_curvature import CaptureLosses
from tests.helpers.models import block_index

Loss = Callable[[], Tensor]


def means_by_block(
    model: nn.Module, diagonal: dict[str, Tensor], **options: Any
) -> dict[str, Tensor]:
    """The mean of a diagonal over the blocks of each parameter."""
    means = {}
    for name, blocks in find_blocks(model, **options).items():
        index = block_index(tuple(diagonal[name].shape), blocks.split)
        means[name] = torch.stack(
            [diagonal[name][index == block].mean() for block in range(blocks.num_blocks)]
        )
    return means


def _rows(outputs: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The derivative of each entry of a vector by each of the tensors, one row an entry."""
    unit = torch.eye(len(outputs), dtype=outputs.dtype)
    rows: Any = [None] * len(inputs)
    if outputs.requires_grad:
        rows = torch.autograd.grad(
            outputs, inputs, unit, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
    zeros = [torch.zeros(len(outputs), x.numel(), dtype=x.dtype) for x in inputs]
    return [zero if row is None else row.reshape(zero.shape) for row, zero in zip(rows, zeros)]


def _diagonal(value: Tensor, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The diagonal of the Hessian of `value`: one row an entry of the parameters."""
    gradients = torch.autograd.grad(
        value, list(parameters.values()), create_graph=True, materialize_grads=True
    )
    pairs = zip(parameters.items(), gradients)
    return {
        name: _rows(gradient.flatten(), [p])[0].diagonal().view_as(p)
        for (name, p), gradient in pairs
    }


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def random_update(model: nn.Module, size: float = 1.0, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: size * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for n, p in trainable(model).items()
    }


def hessian_means(model: nn.Module, loss_of: Loss) -> dict[str, Tensor]:
    """tr(H_bb) / dim_b."""
    with sdpa_kernel(SDPBackend.MATH):
        return means_by_block(model, _diagonal(loss_of(), trainable(model)))


def hessian(model: nn.Module, loss_of: Loss) -> tuple[Tensor, Tensor]:
    """The gradient and the whole Hessian of all trainable parameters, one after another."""
    parameters = list(trainable(model).values())
    with sdpa_kernel(SDPBackend.MATH):
        gradients = torch.autograd.grad(
            loss_of(), parameters, create_graph=True, materialize_grads=True
        )
        gradient = torch.cat([g.flatten() for g in gradients])
        return gradient.detach(), torch.cat(_rows(gradient, parameters), 1)


def gauss_newton_means(model: nn.Module, loss_of: Loss) -> dict[str, Tensor]:
    """tr(J_bᵀ Λ J_b) / dim_b, with J row by row and Λ by autograd in the predictions."""
    with CaptureLosses() as seen, sdpa_kernel(SDPBackend.MATH):
        loss = loss_of()
    parameters = trainable(model)
    tensors, total = list(parameters.values()), torch.zeros(())
    for call in seen.calls:  # predictions of several calls are not coupled by a sum of their losses
        (first,) = torch.autograd.grad(loss, call.prediction, create_graph=True)
        (curvature,) = _rows(first.flatten(), [call.prediction])
        counts = curvature.ne(0).any(1)
        jacobian = torch.cat(_rows(call.prediction.flatten()[counts], tensors), 1)
        total = total + (jacobian * (curvature[counts][:, counts].to(jacobian) @ jacobian)).sum(0)
    parts = total.split([p.numel() for p in tensors])
    return means_by_block(
        model, {name: part.view_as(p) for (name, p), part in zip(parameters.items(), parts)}
    )


def functional_diagonal(model: nn.Module, modules: list[str], loss_of: Loss) -> dict[str, Tensor]:
    """The second derivative of attention modules alone, of every parameter inside of them.

    That is the Hessian of `g · module(x)` in the module's parameters, for its input x and the
    gradient g at its output.
    """
    calls: dict[str, tuple[Any, ...]] = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _, args, kwargs, output, name=name: calls.__setitem__(
                name, (args, kwargs, output)
            ),
            with_kwargs=True,
        )
        for name in modules
    ]
    loss = loss_of()
    for hook in hooks:
        hook.remove()

    def first(output: Any) -> Tensor:
        return output[0] if isinstance(output, tuple) else output

    def fixed(value: Any) -> Any:
        return (
            value.detach()
            if isinstance(value, Tensor)
            else tuple(map(fixed, value))
            if isinstance(value, tuple)
            else value
        )

    gradients = torch.autograd.grad(loss, [first(calls[name][2]) for name in modules])
    found = {}
    with sdpa_kernel(SDPBackend.MATH):
        for name, g in zip(modules, gradients):
            module, (args, kwargs, _) = model.get_submodule(name), calls[name]
            output = first(
                module(*fixed(args), **{key: fixed(value) for key, value in kwargs.items()})
            )
            inside = _diagonal((g * output).sum(), trainable(module))
            found |= {f"{name}.{inner}": values for inner, values in inside.items()}
    return found


def assert_means(
    found: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float = 1e-10
) -> None:
    """Within `tolerance` of the largest of the parameter, or 1e-12 of the largest of all."""
    assert found.keys() == exact.keys()
    largest = max(float(e.abs().max()) for e in exact.values())
    assert largest > 0
    for name, e in exact.items():
        assert found[name].shape == e.shape, name
        error = float((found[name] - e).abs().max())
        assert error <= tolerance * float(e.abs().max()) + 1e-2 * tolerance * largest, (
            f"{name}: off by {error:.3g} from {e}"
        )


def assert_gauss_newton_is_exact(model: nn.Module, loss_of: Loss, tolerance: float = 1e-10) -> None:
    """All labels of all positions give the exact Gauss-Newton trace."""
    found = analytic(model, loss_of, num_probes=None)
    assert_means(found, gauss_newton_means(model, loss_of), tolerance)


class Attention(nn.Module):
    """Softmax attention with groups, one matrix or three, a scale, a mask, RoPE, QK-norm.

    Args:
        width: Of the input.
        heads: Number of query heads.
        groups: Number of key heads.
        fused: Whether one matrix holds query, key and value.
        causal: Whether positions see only those before them.
        scale: Of the scores.
        rope: Whether queries and keys are rotated by their positions, and by what they are
            multiplied then.
        norm: Whether queries and keys are normalised.
        factor: What keys and values are multiplied by before the call.
        repeat: Whether shared keys are repeated before the call, as transformers does, and not by
            it.
        sequence_first: Whether the input is (T, B, D).
    """

    def __init__(
        self,
        width: int = 6,
        heads: int = 2,
        groups: int | None = None,
        fused: bool = False,
        causal: bool = True,
        scale: float | None = None,
        rope: float = 0.0,
        norm: bool = False,
        factor: float = 1.0,
        repeat: bool = False,
        sequence_first: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, groups or heads, 4
        sizes = [
            self.head_dim * count
            for count in (heads, self.num_key_value_heads, self.num_key_value_heads)
        ]
        if fused:
            self.qkv_proj = nn.Linear(width, sum(sizes))
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, size) for size in sizes)
        self.o_proj = nn.Linear(sizes[0], width)
        self.norm = nn.RMSNorm(self.head_dim) if norm else None
        self.sizes, self.causal, self.scale, self.rope = sizes, causal, scale, rope
        self.factor, self.repeat, self.sequence_first = factor, repeat, sequence_first

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        fused = hasattr(self, "qkv_proj")
        parts = (
            self.qkv_proj(x).split(self.sizes, -1)
            if fused
            else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        order = (1, 2, 0, 3) if self.sequence_first else (0, 2, 1, 3)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).permute(order) for part in parts)
        if self.norm is not None:
            q, k = self.norm(q), self.norm(k)
        if self.rope:
            q, k = self.rope * rotate(q), self.rope * rotate(k)
        k, v = self.factor * k, self.factor * v
        if self.repeat:
            k, v = (
                part.repeat_interleave(self.num_heads // self.num_key_value_heads, dim=1)
                for part in (k, v)
            )
        grouped = k.shape[1] != q.shape[1]
        causal = self.causal and mask is None
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=self.scale, enable_gqa=grouped
        )
        return self.o_proj(
            mixed.permute((2, 0, 1, 3) if self.sequence_first else (0, 2, 1, 3)).flatten(-2)
        )


def rotate(x: Tensor) -> Tensor:
    """RoPE on (B, H, T, dh)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], dtype=x.dtype).unsqueeze(1) / 3.0 ** torch.arange(
        half, dtype=x.dtype
    )
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Net(nn.Module):
    """Embedding, attention with residuals, `top`, and a head; by default affine above attention."""

    def __init__(
        self,
        layers: int = 1,
        top: nn.Module | None = None,
        vocabulary: int = 5,
        width: int = 6,
        **options: Any,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Attention(width, **options) for _ in range(layers))
        self.top = nn.Identity() if top is None else top
        self.head = nn.Linear(width, vocabulary)

    def features(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, mask)
        return self.top(x)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.features(tokens, mask))


def build(cls: type[nn.Module] = Net, *args: Any, spread: float = 0.5, **options: Any) -> Any:
    """A seeded float64 model with weights so large that attention is far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(*args, **options).double()
        for p in model.parameters():
            nn.init.normal_(p, std=spread if p.ndim > 1 else 1 / math.sqrt(10))
    return model


def tokens_of(*shape: int, vocabulary: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocabulary, shape, generator=generator) for _ in range(2))  # type: ignore[return-value]


def language_loss(model: nn.Module, *shape: int, seed: int = 0, mask: Tensor | None = None) -> Loss:
    """The mean cross-entropy of a batch of random tokens."""
    tokens, targets = tokens_of(*(shape or (2, 4)), seed=seed)
    given = () if mask is None else (mask,)
    return lambda: F.cross_entropy(model(tokens, *given).flatten(0, 1), targets.flatten())
