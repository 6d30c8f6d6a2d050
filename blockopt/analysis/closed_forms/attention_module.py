"""The closed form of an attention layer of a model: Llama, Mistral, Qwen, Gemma and their like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from blockopt.analysis.closed_forms.normalization import NormKind
from blockopt.analysis.closed_forms.output_loss import OutputLoss
from blockopt.analysis.closed_forms.rotary_positions import RotaryPositions
from blockopt.analysis.closed_forms.score_vectors import HeadNorm
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian

# Names of the projections; Phi and LFM2 have others for the last.
PROJECTIONS = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "output": ("o_proj", "dense", "out_proj"),
}
# What changes scores or attention beyond the closed forms, by the attribute that tells
BEYOND = {
    "attn_logit_softcapping": "a soft cap bends its scores",  # Gemma 2
    "sinks": "part of its attention goes to sinks",  # gpt-oss
}
# The closed form must have the output of the layer up to this, relative to its largest entry:
# models compute norms, rotations and softmax in float32, whatever their dtype.
TOLERANCE = 1e-5


def attention_hessian(
    module: nn.Module,
    hidden_states: Tensor,
    loss: OutputLoss,
    *,
    rotary: RotaryPositions | None = None,
    mask: Tensor | None = None,
) -> SelfAttentionHessian:
    """Return the Hessian of `loss(module(hidden_states))` by the weights of the layer.

    The layer has `q_proj`, `k_proj`, `v_proj` and `o_proj`, with or without biases, optionally
    `q_norm` and `k_norm` of each head, and its call is that of transformers. Its own output is
    compared with that of the closed form, so that a layer that computes anything else is refused;
    so are sinks (gpt-oss) and soft caps (Gemma 2), which bend small scores too little to show.
    Entries are in the layout of closed forms: by head, and by input before output. The weight of
    `q_proj` is `W_Q.mT.flatten(0, 1)`.

    Args:
        module: The attention layer, for example `model.model.layers[0].self_attn`.
        hidden_states: What enters it, (B, L, d).
        loss: On its output, before the residual connection.
        rotary: Its rotations; for models of transformers
            `RotaryPositions(*model.model.rotary_emb(hidden_states, positions))`.
        mask: Bool, True where a position sees another, (L, L) or (B, L, L). By default causal,
            within the sliding window of the layer if it has one.

    Raises:
        ValueError: If a projection is missing, or the layer computes something else.
    """
    layers, head_dim = _projections(module), _head_dim(module)
    for name, what in BEYOND.items():
        if getattr(module, name, None) is not None:
            raise ValueError(
                f"Invalid module {type(module).__name__}: {what}, which no closed form has. Use a "
                "HessianOperator of the model."
            )
    if mask is None:
        mask = _causal_mask(module, hidden_states)
    weights, biases = {}, {}
    for role, layer in layers.items():
        weights[role] = layer.weight.T.unflatten(int(role != "output"), (-1, head_dim))
        if layer.bias is not None:
            biases[role] = layer.bias if role == "output" else layer.bias.view(-1, head_dim)
    query, key, value = (weights[role].movedim(1, 0) for role in ("query", "key", "value"))
    hessian = SelfAttentionHessian(
        *(hidden_states, query, key, value),
        loss=loss,
        W_U=weights["output"],
        mask=mask,
        scale=getattr(module, "scaling", None),
        biases=biases,
        rotary=rotary,
        norms=_norms(module, head_dim),
    )
    _check_output(module, hidden_states, mask, rotary, hessian.attention.output)
    return hessian


def _projections(module: nn.Module) -> dict[str, Any]:
    """Return the layers that make queries, keys, values and the output."""
    found = {
        role: next((getattr(module, name) for name in names if hasattr(module, name)), None)
        for role, names in PROJECTIONS.items()
    }
    missing = [PROJECTIONS[role][0] for role, layer in found.items() if layer is None]
    if missing:
        raise ValueError(
            f"Invalid module {type(module).__name__}: it has no {', '.join(missing)}. Give the "
            "weights to SelfAttentionHessian."
        )
    return found


def _causal_mask(module: nn.Module, hidden_states: Tensor) -> Tensor:
    """Return who sees whom by default, (L, L)."""
    length = hidden_states.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=hidden_states.device).tril()
    config = getattr(module, "config", None)
    window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    return mask if window is None else mask.triu(1 - int(window))


def _head_dim(module: nn.Module) -> int:
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int):
        raise ValueError(
            f"Invalid module {type(module).__name__}: it has no head_dim. Give the weights to "
            "SelfAttentionHessian."
        )
    return head_dim


def _norms(module: nn.Module, head_dim: int) -> dict[str, HeadNorm]:
    """Return the norms of queries and keys, if the layer has any."""
    found = {}
    for role, name in (("query", "q_norm"), ("key", "k_norm")):
        norm: Any = getattr(module, name, None)
        if isinstance(norm, nn.Module):
            epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
            kind: NormKind = "layer" if isinstance(norm, nn.LayerNorm) else "rms"
            gain = getattr(norm, "weight", None)
            if gain is not None and gain.shape != (head_dim,):
                raise ValueError(
                    f"Invalid {name} of {type(module).__name__}, with gains of shape "
                    f"{tuple(gain.shape)}. Must be one norm for each head, ({head_dim},), shared "
                    "by the heads. Other layers need a HessianOperator of the model."
                )
            # Without one, torch takes the epsilon of the dtype.
            default = 0.0 if gain is None else torch.finfo(gain.dtype).eps
            epsilon = default if epsilon is None else float(epsilon)
            found[role] = HeadNorm(_gain(norm, gain, kind), kind, epsilon)
    return found


def _gain(norm: nn.Module, weight: Tensor | None, kind: NormKind) -> Tensor | None:
    """Return what a norm multiplies by: its weight, or that plus one, as Gemma has it."""
    if weight is None or kind == "layer":
        return weight
    weight = weight.detach()
    with torch.no_grad():
        of_ones = norm(torch.ones_like(weight))  # the gain, up to epsilon
    return min(weight, weight + 1, key=lambda gain: float((of_ones - gain).abs().max()))


def _check_output(
    module: nn.Module,
    hidden_states: Tensor,
    mask: Tensor,
    rotary: RotaryPositions | None,
    found: Tensor,
) -> None:
    """Raise `ValueError` unless the layer's own output is the one found here."""
    added = torch.zeros(mask.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    added = added.masked_fill(~mask, torch.finfo(added.dtype).min)
    added = added.expand(len(hidden_states), *mask.shape[-2:]).unsqueeze(1)
    embeddings = None if rotary is None else (rotary.cos, rotary.sin)
    training = module.training
    try:
        module.eval()
        with torch.no_grad():
            output = module(hidden_states, position_embeddings=embeddings, attention_mask=added)
    finally:
        module.train(training)
    output = output[0] if isinstance(output, tuple) else output
    error, size = float((output - found).abs().max()), float(output.abs().max())
    if not error <= TOLERANCE * size:
        raise ValueError(
            f"The output of {type(module).__name__} differs by {error:.3g}, of {size:.3g}, from "
            "softmax attention with these projections. Check rotary and mask. A layer that "
            "computes anything else needs a HessianOperator of the model."
        )
