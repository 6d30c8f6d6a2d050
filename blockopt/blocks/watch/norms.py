"""Weights and biases of normalizations in a forward pass, and other gains."""

from __future__ import annotations

from torch import Tensor

from blockopt.blocks.watch.forward_graph import ForwardGraph, Op, Value
from blockopt.blocks.watch.linear_maps import VIEWS, parameters_of

_NORMS = (
    *("native_layer_norm", "_fused_rms_norm", "native_group_norm"),
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
    *("_batch_norm_with_update", "cudnn_batch_norm", "miopen_batch_norm"),
)
_STATISTICS = (
    *("rsqrt", "sqrt", "linalg_vector_norm", "norm", "std", "var", "std_mean", "var_mean"),
    "reciprocal",
)
_DEPTH = 4  # steps between a statistic and the weight that follows: square root, division, cast


def norm_parameters(graph: ForwardGraph) -> list[Tensor]:
    """Parameters that scale or shift, as vectors, what was divided by its own statistics.

    So do all other vectors and numbers that multiply activations, such as the scale of a branch or
    of the scores, and those that nGPT has in the place of norms.
    """
    found: dict[Tensor, None] = {}
    for op in graph.ops:
        weights = [value for value in op.inputs if value.kind == "weight"]
        if not weights or not op.activations:
            continue
        is_scale = op.name == "mul" and _is_normalized(op.activations[0], _DEPTH)
        if op.name == "mul" and not is_scale:
            plain = [value for value in weights if not _is_exponential(value)]
            scales = [p for value in plain for p in parameters_of(value, graph)]
            found |= dict.fromkeys(p for p in scales if _is_vector(p))
        elif op.name in _NORMS or is_scale:
            for value in (*weights, *(_shifts(op) if is_scale else ())):
                found |= dict.fromkeys(parameters_of(value, graph))
    return list(found)


def _is_exponential(value: Value) -> bool:
    """Whether a weight is an exponential: then it is a rate at which something fades."""
    stack, seen = [value.op], set()
    while stack:
        op = stack.pop()
        if op is None or op in seen:
            continue
        if op.name in ("exp", "softplus"):
            return True
        seen.add(op)
        stack += [source.op for source in op.inputs]
    return False


def _is_vector(tensor: Tensor) -> bool:
    return sum(size > 1 for size in tensor.shape) <= 1


def _is_normalized(value: Value, depth: int) -> bool:
    op = value.op
    if op is not None and op.name in _NORMS:
        return True
    if op is None or depth == 0 or op.name not in (*VIEWS, "mul", "div", "sub", "add"):
        return False
    if op.name in ("mul", "div") and any(_is_statistic(v, _DEPTH) for v in op.activations[-2:]):
        return True
    return any(_is_normalized(v, depth - 1) for v in op.activations)


def _is_statistic(value: Value, depth: int) -> bool:
    if value.op is None or depth == 0:
        return False
    if value.op.name in _STATISTICS:
        return True
    passes = value.op.name in (*VIEWS, "add", "clamp_min", "clamp", "pow")
    return passes and any(_is_statistic(v, depth - 1) for v in value.op.activations)


def _shifts(scale: Op) -> list[Value]:
    """What is added to a scaled value."""
    adds = [op for output in scale.outputs for op in output.consumers if op.name == "add"]
    return [value for op in adds for value in op.inputs if value.kind == "weight"]
