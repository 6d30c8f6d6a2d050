"""The layers of a model as it runs: what each linear map, embedding and norm was given, and its gradients sequence by sequence.

For `y = W x` the gradient of one sequence is `Σ_t d_t x_tᵀ`, with `d` the gradient at `y`. Labels
sampled independently make the gradients of different sequences independent, so the sum over
sequences of the squared gradients estimates the Gauss-Newton trace without the noise that the
products between sequences would add. It needs no weight gradient, only `x` and `d`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from blockopt.blocks import layouts
from blockopt.blocks.split import Split, block_sum, block_sum_along
from blockopt.measure.attention_capture import AttentionCall

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
        padding: The token whose embedding is not trained, None if all are.
        x: (S, T, D) for S sequences: the input, or for a norm the derivative of the output by the
            weight; (S, T) for tokens.
        y: (S, T, D), the output.
        edge: Where the gradient at the output is found in the graph.
        source: Where the input comes from in the graph, None if it needs no gradient.
        cut: Brings the gradient at the output to the form of `y`.
        attention_calls: How many attention calls the model had made before.
        local: Whether a prediction depends on one position at most, as far as was tried.
    """

    module: str
    kind: Kind
    weight: str | None
    bias: str | None
    shape: torch.Size
    input_first: bool
    padding: int | None
    x: Tensor
    y: Tensor
    edge: GradientEdge
    source: Node | None
    cut: Callable[[Tensor], Tensor]
    attention_calls: int
    local: bool = True

    def joined(self) -> LayerCall:
        """The same with all sequences as one, which is noisier, not wrong."""
        x, y = (t.reshape(1, -1, *t.shape[2:]) for t in (self.x, self.y))
        return self._replace(x=x, y=y, cut=lambda d: self.cut(d).reshape(1, -1, d.shape[-1]))


@contextmanager
def capture_layers(model: nn.Module, attention: list[AttentionCall]) -> Iterator[list[LayerCall]]:
    """Record the calls of linear maps, embeddings and norms that have trainable parameters; the list is filled on leaving."""
    names: dict[Any, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    seen: list[tuple[str, Kind, nn.Module, Tensor, Tensor, GradientEdge, Node | None, int]] = []
    calls: list[LayerCall] = []

    def record(
        name: str,
        kind: Kind,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if alone and isinstance(output, Tensor) and output.requires_grad:
            x, edge = (
                args[0],
                get_gradient_edge(output),
            )  # now: what follows may change the output in place
            source = get_gradient_edge(x).node if x.requires_grad else None
            seen.append(
                (name, kind, module, x.detach(), output.detach(), edge, source, len(attention))
            )

    with ExitStack() as stack:
        for name, module in model.named_modules():
            kind = _kind(module)
            if kind and any(p in names for p in module.parameters(recurse=False)):
                stack.callback(
                    module.register_forward_hook(
                        partial(record, name, kind), prepend=True, with_kwargs=True
                    ).remove
                )
        yield calls
    sequence_first = any(
        isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in model.modules()
    )
    sizes = Counter(
        [call.query.shape[0] for call in attention]
        or [len(x) for _, _, _, x, *_ in seen if x.ndim > 1]
    )
    cut = partial(
        by_sequence,
        number=max(sizes, key=sizes.__getitem__, default=1),
        sequence_first=sequence_first,
    )
    for name, kind, module, given, y, edge, source, before in seen:
        x = _derivative(module, given) if kind == "norm" else given
        if x is None or (kind == "linear" and not _is_linear(module, x, y)):
            continue
        x = cut(x.unsqueeze(-1)).squeeze(-1) if kind == "embedding" else cut(_wide(x))
        own = dict(module.named_parameters(recurse=False))
        weight, bias = names.get(own.get("weight")), names.get(own.get("bias"))
        shape: torch.Size = module.weight.shape  # type: ignore[assignment]
        stored, padding = not isinstance(module, nn.Linear), getattr(module, "padding_idx", None)
        calls.append(
            LayerCall(
                name,
                kind,
                weight,
                bias,
                shape,
                stored,
                padding,
                x,
                cut(y),
                edge,
                source,
                cut,
                before,
            )
        )


def _kind(module: nn.Module) -> Kind | None:
    """What the module computes, as its type says; None for all else."""
    forward = type(module).forward
    if forward is nn.Embedding.forward:
        return "embedding" if module.max_norm is None and not module.scale_grad_by_freq else None
    if isinstance(module, nn.Linear) or (
        layouts.is_named(module, "Conv1D") and hasattr(module, "nf")
    ):
        return "linear"
    own = list(module.parameters(recurse=False))
    named = "Norm" in type(module).__name__ and not isinstance(
        module, (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
    )
    has_weight = isinstance(getattr(module, "weight", None), Tensor)
    return "norm" if named and has_weight and all(p.ndim == 1 for p in own) else None


@torch.no_grad()
def _is_linear(module: nn.Module, x: Tensor, y: Tensor) -> bool:
    """Whether a type that changes the forward of `nn.Linear` still computes what that does."""
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return True
    if not module.weight.is_floating_point() or module.weight.shape != (
        module.out_features,
        module.in_features,
    ):
        return False
    expected = nn.functional.linear(x.to(module.weight.dtype), module.weight, module.bias).to(
        y.dtype
    )
    return expected.shape == y.shape and torch.allclose(y, expected, rtol=1e-2, atol=1e-5)


@torch.no_grad()
def _derivative(norm: nn.Module, x: Tensor) -> Tensor | None:
    """The derivative of a norm's output by its weight `w`, whether the norm multiplies by `w` or by `1 + w`.

    None unless output and weight are found to be affine along the last dimension: some norms have
    their channels elsewhere.
    """
    x = _wide(x)
    own = {
        name: torch.zeros_like(p, dtype=x.dtype) for name, p in norm.named_parameters(recurse=False)
    }
    if "weight" not in own:  # but computed from others
        return None
    ramp = torch.linspace(1, 2, len(own["weight"]), dtype=x.dtype, device=x.device)
    weights = (torch.zeros_like(ramp), torch.ones_like(ramp), ramp)
    low, high, tilted = (
        torch.func.functional_call(norm, own | {"weight": w}, (x,)) for w in weights
    )
    fits: bool = high.shape[-1] == len(ramp) and torch.allclose(
        tilted - low, ramp * (high - low), rtol=1e-3, atol=1e-5
    )
    return high - low if fits else None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def by_sequence(x: Tensor, number: int, sequence_first: bool) -> Tensor:
    """(…, D) as (S, T, D): `number` sequences if the dimensions say so, else all rows as one, which is noisier, not wrong."""
    lead = x.shape[:-1]
    if len(lead) == 2 and lead[1] == number and (sequence_first or lead[0] != number):
        return x.transpose(0, 1)
    if lead and (lead[0] == number or (len(lead) == 1 and lead[0] % number == 0)):
        return x.reshape(number, -1, x.shape[-1])
    return x.reshape(1, -1, x.shape[-1])


def checked(
    calls: list[LayerCall], predictions: list[Tensor], names: Mapping[Any, str]
) -> list[LayerCall]:
    """The calls without those parameters that the predictions also reach past them, such as a head tied by hand."""
    inside = {call.edge.node: call.source for call in calls}
    nodes = [p.grad_fn for p in predictions]
    visited: set[Node] = set()
    elsewhere = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        elsewhere.add(names.get(getattr(node, "variable", None)))
        nodes += (
            [inside[node]]
            if node in inside
            else [following for following, _ in node.next_functions]
        )

    def alone(name: str | None) -> str | None:
        return None if name in elsewhere else name

    return [call._replace(weight=alone(call.weight), bias=alone(call.bias)) for call in calls]


def by_reach(calls: list[LayerCall], reached: Sequence[Tensor | None]) -> list[LayerCall]:
    """The calls, cut into sequences only where one prediction reaches one sequence alone, and with `local` set.

    Args:
        calls: As captured.
        reached: The gradient of one prediction at their outputs.
    """
    found = []
    for call, d in zip(calls, reached):
        rows = torch.zeros(1, 1) if d is None else call.cut(d).ne(0).any(-1)  # (S, T)
        apart = call if int(rows.any(1).sum()) <= 1 else call.joined()
        found.append(apart._replace(local=call.local and int(rows.sum()) <= 1))
    return found


Use = tuple[LayerCall, Tensor]


def uses_of(calls: list[LayerCall], gradients: Sequence[Tensor | None]) -> dict[str, list[Use]]:
    """`{parameter name: (layer, gradient at its output)}`; a bias is a norm's weight with an input of 1."""
    uses: dict[str, list[Use]] = {}
    for call, d in zip(calls, gradients):
        if d is None:
            continue
        d = call.cut(_wide(d))
        if call.padding is not None:
            d = d.masked_fill((call.x == call.padding).unsqueeze(-1), 0.0)
        if call.weight is not None:
            uses.setdefault(call.weight, []).append((call, d))
        if call.bias is not None:
            alone = call._replace(
                kind="norm", weight=call.bias, x=torch.ones_like(d[:1, :1]), shape=d.shape[-1:]
            )
            uses.setdefault(call.bias, []).append((alone, d))
    return uses


def squared_sums(parts: list[Use], split: Split | None) -> Tensor:
    """The squared gradients of each sequence, summed over sequences and over each block of a parameter with these uses."""
    if len(parts) > 1:  # tied or shared: the gradients of all uses add up before they are squared
        return sum(
            (block_sum(gradient.square(), split) for gradient in _dense_gradients(parts)),
            torch.zeros(()),
        )
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
        keys, places = torch.unique(
            call.x + offsets, return_inverse=True
        )  # one row for each token of each sequence
        rows = (
            d.new_zeros(len(keys), d.shape[-1])
            .index_add_(0, places.flatten(), d.flatten(0, 1))
            .square()
        )
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
        parts = [
            (
                call._replace(x=call.x.reshape(1, -1, *call.x.shape[2:])),
                d.flatten(0, 1).unsqueeze(0),
            )
            for call, d in parts
        ]
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
