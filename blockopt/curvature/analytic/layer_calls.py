"""What the linear maps, embeddings and norms of a model were given while it ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from blockopt.blocks import is_named
from blockopt.measure.attention_capture import AttentionCall

Kind = Literal["linear", "embedding", "norm"]


class LayerCall(NamedTuple):
    """One call of a linear map, an embedding or a norm.

    Attributes:
        module: The name of the module.
        kind: What it computes.
        weight: The name of its weight, None if that is not trained.
        bias: The name of its bias, None if it has none that is trained.
        shape: The shape of the weight.
        input_first: Whether the weight is stored with its input dimension first.
        padding: The token whose embedding is not trained, None if all are.
        x: (S, T, D) for S sequences: the input, or for a norm the derivative of the output by the
            weight; (S, T) for tokens.
        y: (S, T, D), the output.
        edge: Where the gradient at the output is found in the graph.
        source: Where the input comes from in the graph, None if it needs no gradient.
        to_sequences: Reshapes a gradient at the output like `y`.
        attention_calls: How many attention calls the model had made before.
        local: Whether a prediction depends on at most one position, as far as was tried.
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
    to_sequences: Callable[[Tensor], Tensor]
    attention_calls: int
    local: bool = True

    def as_one_sequence(self) -> LayerCall:
        """Return the same call with all sequences joined, which is noisier, not wrong."""
        x, y = (t.reshape(1, -1, *t.shape[2:]) for t in (self.x, self.y))
        return self._replace(
            x=x, y=y, to_sequences=lambda d: self.to_sequences(d).reshape(1, -1, d.shape[-1])
        )

    def changed(self, joined: bool, local: bool) -> LayerCall:
        """Return the same call, with its sequences joined and its positions mixed if they are."""
        call = self.as_one_sequence() if joined else self
        return call._replace(local=self.local and local)


@contextmanager
def capture_layers(model: nn.Module, attention: list[AttentionCall]) -> Iterator[list[LayerCall]]:
    """Record the calls of linear maps, embeddings and norms that have trainable parameters.

    The list is filled when the context is left; `capture_attention` fills `attention` meanwhile.
    """
    names: dict[Any, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    seen: list[tuple[nn.Module, LayerCall]] = []
    calls: list[LayerCall] = []

    def record(
        name: str, kind: Kind, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any
    ) -> None:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or not isinstance(y, Tensor) or not y.requires_grad:
            return
        own = dict(module.named_parameters(recurse=False))
        call = LayerCall(
            module=name,
            kind=kind,
            weight=names.get(own.get("weight")),
            bias=names.get(own.get("bias")),
            shape=module.weight.shape,
            input_first=not isinstance(module, nn.Linear),
            padding=getattr(module, "padding_idx", None),
            x=x.detach(),
            y=y.detach(),
            edge=get_gradient_edge(y),  # now: what follows may change the output in place
            source=get_gradient_edge(x).node if x.requires_grad else None,
            to_sequences=lambda d: d,  # until the number of sequences is known
            attention_calls=len(attention),
        )
        seen.append((module, call))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            kind = _kind(module)
            if kind and any(p in names for p in module.parameters(recurse=False)):
                hook = partial(record, name, kind)
                handle = module.register_forward_hook(hook, prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
        yield calls
    to_sequences = partial(
        _to_sequences,
        number=_num_sequences(attention, [call for _, call in seen]),
        sequence_first=any(
            isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in model.modules()
        ),
    )
    for module, call in seen:
        x = _weight_derivative(module, call.x) if call.kind == "norm" else call.x
        if x is None or (call.kind == "linear" and not _is_linear(module, x, call.y)):
            continue
        tokens = call.kind == "embedding"
        x = to_sequences(x.unsqueeze(-1)).squeeze(-1) if tokens else to_sequences(_wide(x))
        calls.append(call._replace(x=x, y=to_sequences(call.y), to_sequences=to_sequences))


def _num_sequences(attention: list[AttentionCall], layers: list[LayerCall]) -> int:
    """Return the most frequent batch size."""
    sizes = [call.query.shape[0] for call in attention]
    counts = Counter(sizes or [len(call.x) for call in layers if call.x.ndim > 1])
    return max(counts, key=counts.__getitem__, default=1)


def _kind(module: nn.Module) -> Kind | None:
    """Return what the module computes, judged by its type; None for all else."""
    if type(module).forward is nn.Embedding.forward:
        return "embedding" if module.max_norm is None and not module.scale_grad_by_freq else None
    is_conv1d = is_named(module, "Conv1D") and hasattr(module, "nf")
    if isinstance(module, nn.Linear) or is_conv1d:
        return "linear"
    own = list(module.parameters(recurse=False))
    named = "Norm" in type(module).__name__ and not isinstance(
        module, (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
    )
    has_weight = isinstance(getattr(module, "weight", None), Tensor)
    return "norm" if named and has_weight and all(p.ndim == 1 for p in own) else None


@torch.no_grad()
def _is_linear(module: nn.Module, x: Tensor, y: Tensor) -> bool:
    """Whether a type with a forward of its own still computes what `nn.Linear` does."""
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return True
    weight = module.weight
    if weight.shape != (module.out_features, module.in_features) or not weight.is_floating_point():
        return False
    expected = nn.functional.linear(x.to(weight.dtype), weight, module.bias).to(y.dtype)
    return expected.shape == y.shape and torch.allclose(y, expected, rtol=1e-2, atol=1e-5)


@torch.no_grad()
def _weight_derivative(norm: nn.Module, x: Tensor) -> Tensor | None:
    """Return the derivative of a norm's output by its weight `w`, which may act as `w` or `1 + w`.

    It is None unless the output is affine in the weight along the last dimension.
    """
    x = _wide(x)
    own = {n: torch.zeros_like(p, dtype=x.dtype) for n, p in norm.named_parameters(recurse=False)}
    if "weight" not in own:  # it is computed from others
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


def _to_sequences(x: Tensor, number: int, sequence_first: bool) -> Tensor:
    """Reshape (…, D) to (S, T, D), with S = `number` if the dimensions allow it, or else 1."""
    lead = x.shape[:-1]
    if len(lead) == 2 and lead[1] == number and (sequence_first or lead[0] != number):
        return x.transpose(0, 1)
    if lead and (lead[0] == number or (len(lead) == 1 and lead[0] % number == 0)):
        return x.reshape(number, -1, x.shape[-1])
    return x.reshape(1, -1, x.shape[-1])


def parameters_used_elsewhere(
    calls: list[LayerCall], predictions: list[Tensor], names: Mapping[Any, str]
) -> set[str]:
    """The names of parameters that are used outside of the calls, such as a head tied by hand."""
    inside = {call.edge.node: call.source for call in calls}
    nodes = [p.grad_fn for p in predictions]
    visited: set[Node] = set()
    elsewhere: set[str] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable in names:
            elsewhere.add(names[variable])
        if node in inside:
            nodes.append(inside[node])
        else:
            nodes += [following for following, _ in node.next_functions]
    return elsewhere


def drop_parameters(calls: list[LayerCall], dropped: set[str]) -> list[LayerCall]:
    """Drop parameters from the calls."""
    return [
        call._replace(
            weight=None if call.weight in dropped else call.weight,
            bias=None if call.bias in dropped else call.bias,
        )
        for call in calls
    ]
