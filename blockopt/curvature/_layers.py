"""The layers of a model as it runs: what each linear map, embedding and norm was given, and its gradients sequence by sequence.

For `y = W x` the gradient of one sequence is `Σ_t d_t x_tᵀ`, with `d` the gradient at `y`. Labels sampled independently make
the gradients of different sequences independent, so the sum over sequences of the squared gradients estimates the Gauss-Newton
trace without the noise that the products between sequences would add. It needs no weight gradient, only `x` and `d`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from blockopt import layouts
from blockopt.split import Split, block_sum, block_sum_along

Kind = Literal["linear", "embedding", "norm"]


class LayerCall(NamedTuple):
    """One call of a linear map, an embedding or a norm.

    Attributes:
        module: Its name.
        kind: What it is.
        weight: Name of its weight, None if that is not trained.
        bias: Name of its bias, None if it has none that is trained.
        shape: Of the weight.
        input_first: Whether the weight is stored with its input dimension first.
        x: (S, T, D) for S sequences: the input, or for a norm the derivative of the output by the weight; (S, T) for tokens.
        y: (S, T, D), the output.
        edge: Where the gradient at the output is found in the graph.
        cut: Brings that gradient to the form of `y`.
        attention_calls: How many attention calls the model had made before.
    """

    module: str
    kind: Kind
    weight: str | None
    bias: str | None
    shape: torch.Size
    input_first: bool
    x: Tensor
    y: Tensor
    edge: GradientEdge
    cut: Callable[[Tensor], Tensor]
    attention_calls: int


@contextmanager
def capture_layers(model: nn.Module, attention_calls: list[Any]) -> Iterator[list[LayerCall]]:
    """Record the calls of linear maps, embeddings and norms that have trainable parameters; the list is filled on leaving."""
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    seen: list[tuple[str, Kind, nn.Module, Tensor, Tensor, GradientEdge, int]] = []
    calls: list[LayerCall] = []

    def record(name: str, kind: Kind, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and output.requires_grad:
            x, y = args[0].detach(), output.detach()
            seen.append((name, kind, module, x, y, get_gradient_edge(output), len(attention_calls)))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            kind = _kind(module)
            if kind and any(p in names for p in module.parameters(recurse=False)):
                stack.callback(module.register_forward_hook(partial(record, name, kind)).remove)
        yield calls
    sequence_first = any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in model.modules())
    dim = 1 if sequence_first else 0
    sizes = Counter(x.shape[dim] for _, _, _, x, *_ in seen if x.ndim > dim)
    cut = partial(by_sequence, number=max(sizes, key=sizes.__getitem__, default=1), sequence_first=sequence_first)
    for name, kind, module, x, y, edge, before in seen:
        own = dict(module.named_parameters(recurse=False))
        weight, bias = names.get(own["weight"]), names.get(own["bias"]) if "bias" in own else None
        x = _derivative(module, x) if kind == "norm" else x
        x = cut(x.unsqueeze(-1)).squeeze(-1) if kind == "embedding" else cut(_wide(x))
        shape: torch.Size = module.weight.shape  # type: ignore[assignment]
        stored = not isinstance(module, nn.Linear)
        calls.append(LayerCall(name, kind, weight, bias, shape, stored, x, cut(y), edge, cut, before))


def _kind(module: nn.Module) -> Kind | None:
    """What the module computes; None for types that change the forward of what they derive from, and for all else."""
    forward = type(module).forward
    if forward is nn.Embedding.forward:
        return "embedding" if module.max_norm is None and not module.scale_grad_by_freq else None
    if forward is nn.Linear.forward or (layouts.is_named(module, "Conv1D") and hasattr(module, "nf")):
        return "linear"
    own = list(module.parameters(recurse=False))
    named = "Norm" in type(module).__name__ and not isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.GroupNorm))
    has_weight = isinstance(getattr(module, "weight", None), Tensor)
    return "norm" if named and has_weight and all(p.ndim == 1 for p in own) else None


@torch.no_grad()
def _derivative(norm: nn.Module, x: Tensor) -> Tensor:
    """The derivative of a norm's output by its weight `w`: affine in `w`, whether the norm multiplies by `w` or by `1 + w`."""
    weight: Tensor = norm.weight  # type: ignore[assignment]
    one, zero = torch.ones_like(weight), torch.zeros_like(weight)
    high, low = (torch.func.functional_call(norm, {"weight": w}, (x,)) for w in (one, zero))
    return high - low  # type: ignore[no-any-return]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def by_sequence(x: Tensor, number: int, sequence_first: bool) -> Tensor:
    """(…, D) as (S, T, D): `number` sequences if the dimensions say so, else all rows as one, which is noisier, not wrong."""
    lead = x.shape[:-1]
    if sequence_first and len(lead) == 2 and lead[1] == number:
        return x.transpose(0, 1)
    if (not sequence_first or len(lead) == 1) and lead and lead[0] == number:
        return x.reshape(number, -1, x.shape[-1])
    return x.reshape(1, -1, x.shape[-1])


Use = tuple[LayerCall, Tensor]


def uses_of(calls: list[LayerCall], gradients: Sequence[Tensor | None]) -> dict[str, list[Use]]:
    """`{parameter name: (layer, gradient at its output)}`; a bias is a norm's weight with an input of 1."""
    uses: dict[str, list[Use]] = {}
    for call, d in zip(calls, gradients):
        if d is None:
            continue
        d = call.cut(_wide(d))
        if call.weight is not None:
            uses.setdefault(call.weight, []).append((call, d))
        if call.bias is not None:
            alone = call._replace(kind="norm", weight=call.bias, x=torch.ones_like(d[:1, :1]), shape=d.shape[-1:])
            uses.setdefault(call.bias, []).append((alone, d))
    return uses


def squared_sums(parts: list[Use], split: Split | None) -> Tensor:
    """The squared gradients of each sequence, summed over sequences and over each block of a parameter with these uses."""
    if len(parts) > 1:  # tied or shared: the gradients of all uses add up before they are squared
        return sum((block_sum(gradient.square(), split) for gradient in _dense_gradients(parts)), torch.zeros(()))
    row = _squared_row(*parts[0], dim=0 if split is None else split.dim)
    return row.sum().reshape(1) if split is None else block_sum_along(row, split)


def by_position(use: Use) -> Use:
    """The same use with every position as a sequence of its own: for layers above which positions do not mix."""
    call, d = use
    if call.kind == "embedding":
        return use
    x = call.x.expand(*d.shape[:2], -1)
    return call._replace(x=x.reshape(-1, 1, x.shape[-1])), d.reshape(-1, 1, d.shape[-1])


def _squared_row(call: LayerCall, d: Tensor, dim: int) -> Tensor:
    """The squared gradients of all sequences, summed over all dimensions of the parameter but `dim`."""
    if call.kind == "norm":
        return (call.x * d).sum(1).square().sum(0)
    if call.kind == "embedding":
        sequences, vocabulary = call.x.shape[0], call.shape[0]
        offsets = vocabulary * torch.arange(sequences, device=call.x.device).unsqueeze(1)
        keys, places = torch.unique(call.x + offsets, return_inverse=True)  # one row for each token of each sequence
        rows = d.new_zeros(len(keys), d.shape[-1]).index_add_(0, places.flatten(), d.flatten(0, 1)).square()
        if dim == 1:
            return rows.sum(0)
        return d.new_zeros(vocabulary).index_add_(0, keys % vocabulary, rows.sum(1))
    along_outputs = (dim == 1) == call.input_first
    return squared_rows(call.x, d) if along_outputs else squared_rows(d, call.x)


def squared_rows(x: Tensor, d: Tensor) -> Tensor:
    """`Σ_s Σ_i (Σ_t d_sto x_sti)²` for each `o`: by the Gram matrix of the positions if that is cheaper than the sum over t.

    Example:
        >>> x, d = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]), torch.tensor([[[1.0], [2.0]]])
        >>> squared_rows(x, d)  # 3² + (4 + 2)²
        tensor([45.])
    """
    positions, width, outputs = x.shape[1], x.shape[2], d.shape[2]
    if positions * (width + outputs) <= width * outputs:
        return (x @ x.mT @ d).mul_(d).sum((0, 1))
    rows = d.new_zeros(outputs)
    for x_one, d_one in zip(x, d):  # one at a time: a gradient is as large as the weight
        rows += (d_one.mT @ x_one).square_().sum(1)
    return rows


def _dense_gradients(parts: list[Use]) -> Iterator[Tensor]:
    """The gradient of a parameter with several uses, for one sequence after another."""
    if len({call.x.shape[0] if call.kind != "norm" else d.shape[0] for call, d in parts}) > 1:
        parts = [(call._replace(x=call.x.reshape(1, -1, *call.x.shape[2:])), d.flatten(0, 1).unsqueeze(0)) for call, d in parts]
    for index in range(parts[0][1].shape[0]):
        total: Any = 0
        for call, d in parts:
            x_one, d_one = call.x[index if call.x.shape[0] > 1 else 0], d[index]
            if call.kind == "norm":
                total = total + (x_one * d_one).sum(0)
            elif call.kind == "embedding":
                total = total + d.new_zeros(call.shape).index_add_(0, x_one, d_one)
            else:
                total = total + (x_one.mT @ d_one if call.input_first else d_one.mT @ x_one)
        yield total
