"""The closed form of an attention layer of a model: GPT-2, Llama, Qwen, Gemma and their like."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from blockopt.analysis.closed_forms.attention_weights import ROLES, attention_weights
from blockopt.analysis.closed_forms.normalization import NormKind
from blockopt.analysis.closed_forms.output_loss import OutputLoss
from blockopt.analysis.closed_forms.rotary_positions import RotaryPositions
from blockopt.analysis.closed_forms.score_vectors import HeadNorm
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from blockopt.no_trace import preserved_state

# What changes scores or attention beyond the closed forms, by the attribute that tells, of the
# layer or of its config
BY_DISTANCE = "a learned bias for each distance is added to its scores"
BEYOND = {
    "attn_logit_softcapping": "a soft cap bends its scores",  # Gemma 2
    "sinks": "part of its attention goes to sinks",  # gpt-oss
    "relative_attention_num_buckets": BY_DISTANCE,  # T5
    "use_relative_position_bias": BY_DISTANCE,  # BEiT, whose model adds it to the mask
    "use_shared_relative_position_bias": BY_DISTANCE,
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

    Its queries, keys and values may be separate or fused in any order, as in GPT-2 (`c_attn`),
    GPT-NeoX (`query_key_value`), Phi-3 (`qkv_proj`) and `nn.MultiheadAttention`, with or without
    biases, and optionally with a norm of the queries and the keys of each head. Its own output is
    compared with that of the closed form, so that a layer that computes anything else is refused;
    so are sinks (gpt-oss) and soft caps (Gemma 2), which bend small scores too little to show, and
    biases by distance that the model may hand in (T5, BEiT).
    Entries are in the layout of closed forms: by role, by head, and by input before output. The
    weight of a `q_proj` is `W_Q.mT.flatten(0, 1)`.

    Args:
        module: The attention layer, for example `model.model.layers[0].self_attn`.
        hidden_states: What enters it, (B, L, d).
        loss: On its output, before the residual connection.
        rotary: Its rotations; for models of transformers
            `RotaryPositions(*model.model.rotary_emb(hidden_states, positions))`.
        mask: Bool, True where a position sees another, (L, L) or (B, L, L). By default causal, or
            everything if the layer says that it is not causal, and not that of a decoder; within
            the sliding window of the layer if it has one.

    Raises:
        ValueError: If a projection is missing, or the layer computes something else.
    """
    config = getattr(module, "config", None)
    for name, what in BEYOND.items():
        declared = getattr(module, name, getattr(config, name, None))
        if declared is not None and declared is not False:
            raise ValueError(
                f"Invalid module {type(module).__name__}: {what}, which no closed form has. Use a "
                "HessianOperator of the model."
            )
    mask = _default_mask(module, hidden_states) if mask is None else mask
    matrices, biases = attention_weights(module)
    query, key, value, output = (matrices[role] for role in ROLES)
    hessian = SelfAttentionHessian(
        *(hidden_states, query, key, value),
        loss=loss,
        W_U=output,
        mask=mask,
        scale=_scale(module),
        biases=biases,
        rotary=rotary,
        norms=_norms(module, query.shape[-1]),
    )
    _check_output(module, hidden_states, mask, rotary, hessian.attention.output)
    return hessian


def _default_mask(module: nn.Module, hidden_states: Tensor) -> Tensor:
    """Return who sees whom by default, (L, L)."""
    length = hidden_states.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool, device=hidden_states.device)
    window = getattr(module, "sliding_window", _window_of_config(getattr(module, "config", None)))
    reach = int(window) - 1 if window else length  # 0 is no window
    # Some decoders say that they are not causal, since their model hands them the mask.
    if getattr(module, "is_causal", True) is False and not getattr(module, "is_decoder", False):
        return mask.triu(-reach).tril(reach)
    return mask.triu(-reach).tril()


def _window_of_config(config: Any) -> int | None:
    """Return the window of a config whose class has one; others keep what they have no use for."""
    if config is None or "sliding_window" not in inspect.signature(type(config)).parameters:
        return None
    window: int | None = config.sliding_window
    return window


def _scale(module: nn.Module) -> float | None:
    """Return the factor of the scores that the layer declares, if it does."""
    declared = (getattr(module, name, None) for name in ("scaling", "scale"))
    return next((number for number in declared if isinstance(number, float)), None)


def _norms(module: nn.Module, head_dim: int) -> dict[str, HeadNorm]:
    """Return the norms of queries and keys, if the layer has any."""
    found = {}
    for role in ("query", "key"):
        names = (f"{role[0]}_norm", f"{role[0]}_layernorm")
        name = next((name for name in names if hasattr(module, name)), "")
        norm: Any = getattr(module, name, None)
        if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
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
            bias = getattr(norm, "bias", None)
            found[role] = HeadNorm(_gain(norm, gain, kind), kind, epsilon, bias)
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
    try:
        with preserved_state(module), torch.no_grad():
            output = _own_output(module, hidden_states, mask, rotary)
    except (TypeError, AttributeError) as reason:  # it needs more, such as positions or biases
        raise ValueError(
            f"Invalid module {type(module).__name__}: it cannot be called as attention layers of "
            f"transformers are ({reason}). Give its weights to SelfAttentionHessian."
        ) from reason
    error, size = float((output - found).abs().max()), float(output.abs().max())
    if not error <= TOLERANCE * size:
        raise ValueError(
            f"The output of {type(module).__name__} differs by {error:.3g}, of {size:.3g}, from "
            "softmax attention with these projections. Check rotary, its layout, and mask. A layer "
            "that computes anything else needs a HessianOperator of the model."
        )


def _own_output(
    module: nn.Module, hidden_states: Tensor, mask: Tensor, rotary: RotaryPositions | None
) -> Tensor:
    """Call the layer; one that takes no mask has its own."""
    visible = mask.expand(len(hidden_states), *mask.shape[-2:])
    if isinstance(module, nn.MultiheadAttention):
        X = hidden_states if module.batch_first else hidden_states.transpose(0, 1)
        hidden = ~visible.repeat_interleave(module.num_heads, 0)
        output: Tensor = module(X, X, X, attn_mask=hidden, need_weights=False)[0]
        return output if module.batch_first else output.transpose(0, 1)
    added = torch.zeros(visible.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    added = added.masked_fill(~visible, torch.finfo(added.dtype).min).unsqueeze(1)
    given = {
        "position_embeddings": None if rotary is None else tuple(rotary.given.values()),
        "attention_mask": added,
    }
    accepted = inspect.signature(module.forward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        given = {name: value for name, value in given.items() if name in accepted}
    returned = module(hidden_states, **given)
    output = returned[0] if isinstance(returned, (tuple, list)) else returned
    return output
