"""Attention layers of transformers equal their closed forms, or are refused."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockopt.analysis import (
    CrossEntropy,
    RotaryPositions,
    SquaredError,
    attention_hessian,
    top_eigenpairs,
)
from tests.helpers.attention_reference import assert_close, flat, hessian, sizes_of, unflat

WIDTH, LENGTH, BATCH = 12, 5, 2
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
INTERLEAVED = ("Cohere", "Ernie4_5", "Helium")
FOUR = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}


class OwnNorm(torch.nn.Module):
    """The norm of transformers in the dtype of its input; theirs computes in float32."""

    def __init__(self, theirs):
        super().__init__()
        self.weight, self.added = theirs.weight, float("Gemma" in type(theirs).__name__)
        self.eps = theirs.eps if self.added else theirs.variance_epsilon

    def forward(self, v):
        gain = self.weight + self.added
        return v * (v.square().mean(-1, keepdim=True) + self.eps).rsqrt() * gain


def layer_of(family, **options):
    """An attention layer in float64, hidden states and rotations of a tiny model."""
    torch.manual_seed(3)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 11,
             "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes | HEADS | options)
    # Eager attention has its softmax in float32; a soft cap needs it.
    config._attn_implementation = "eager" if family == "Gemma2" else "sdpa"
    model = getattr(transformers, f"{family}Model")(config).double().eval().requires_grad_(False)
    attention, X = model.layers[0].self_attn, torch.randn(BATCH, LENGTH, WIDTH).double()
    for parameter in attention.parameters():
        parameter.data = torch.randn_like(parameter) / 3 + (parameter.ndim == 1)
    for name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
        if isinstance(getattr(attention, name, None), torch.nn.LayerNorm):
            continue
        if hasattr(attention, name) and family not in ("Olmo2",):
            setattr(attention, name, OwnNorm(getattr(attention, name)))
    kinds = [config.layer_types[0]] if family == "Gemma3Text" else []
    angles = model.rotary_emb(X, torch.arange(LENGTH).unsqueeze(0), *kinds)
    layout = "interleaved" if family in INTERLEAVED else "half"
    return attention, X, RotaryPositions(*(t.to(X) for t in angles), layout=layout)


# Families, options, and how many tokens back a position sees, itself included
LAYERS = {
    "Llama, biases, unused window": (
        "Llama",
        {"attention_bias": True, "sliding_window": 2},
        LENGTH,
    ),
    "Qwen2": ("Qwen2", {}, LENGTH),
    "Qwen3, biases": ("Qwen3", {"attention_bias": True}, LENGTH),
    "Qwen2-MoE, window 0": ("Qwen2Moe", {"num_experts": 2}, LENGTH),
    "LFM2": ("Lfm2", {"layer_types": ["full_attention"]}, LENGTH),
    "Mistral, window": ("Mistral", {"sliding_window": 2}, 2),
    "Qwen2, window": (
        "Qwen2",
        {"layer_types": ["sliding_attention"], "sliding_window": 3, "use_sliding_window": True},
        3,
    ),
    "Gemma, one key": ("Gemma", {"num_key_value_heads": 1}, LENGTH),
    "Gemma 3, scaled queries": (
        "Gemma3Text",
        {"query_pre_attn_scalar": 7, "sliding_window": 4, "layer_types": ["sliding_attention"]},
        4,
    ),
    "Cohere, interleaved": ("Cohere", {}, LENGTH),
    "Phi, partial rotations": ("Phi", FOUR | {"num_key_value_heads": 3}, LENGTH),
    "Phi, norms with biases": (
        *("Phi", FOUR | {"num_key_value_heads": 3, "qk_layernorm": True}),
        LENGTH,
    ),
    "Helium, interleaved, angles stored in halves": ("Helium", FOUR, LENGTH),
    "Ernie 4.5, the same": ("Ernie4_5", FOUR, LENGTH),
    "Granite, multiplier": ("Granite", {"attention_multiplier": 0.3}, LENGTH),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_of_transformers(case):
    family, options, window = LAYERS[case]
    module, X, rotary = layer_of(family, **options)
    names = NAMES | {"output": {"Phi": "dense", "Lfm2": "out_proj"}.get(family, "o_proj")}
    head, classes = torch.randn(WIDTH, 7).double() / 3, torch.randint(7, (BATCH, LENGTH))
    classes[0, 1:3] = -100
    closed = attention_hessian(module, X, CrossEntropy(head, classes), rotary=rotary)
    visible = CAUSAL.triu(1 - window)
    mask = torch.zeros(LENGTH, LENGTH).double().masked_fill(~visible, -math.inf)
    mask = mask.expand(BATCH, 1, LENGTH, LENGTH)

    def loss_of(weights):
        given = {f"{names[role]}.weight": w for role, w in weights.items()}
        angles = tuple(rotary.given.values())
        options = {"position_embeddings": angles, "attention_mask": mask}
        output = torch.func.functional_call(module, given, (X,), options)[0]
        return F.cross_entropy((output @ head).flatten(0, 1), classes.flatten())

    def as_stored(blocks):  # (count, rows, columns) of closed forms as the layer's own matrix
        if blocks["output"].ndim == 3:
            blocks = blocks | {"output": blocks["output"].flatten(0, 1)}
        return {
            role: b.mT if role == "output" else b.mT.flatten(0, 1) for role, b in blocks.items()
        }

    W = [getattr(module, name).weight.detach() for name in names.values()]
    start = {role: w.T.unflatten(1, (-1, 4)).movedim(1, 0) for role, w in zip(names, W[:3])}
    start["output"] = W[3].T.unflatten(0, (-1, 4))
    assert all(torch.equal(a, b) for a, b in zip(as_stored(start).values(), W))
    with sdpa_kernel(SDPBackend.MATH):
        exact = hessian(lambda v: loss_of(as_stored(unflat(v, start))))(flat(start))
    in_float32 = ("Cohere", "Ernie4_5")  # their rotations
    tolerance = 1e-6 if family in in_float32 else 1e-10
    assert_close(closed.dense(), exact, tolerance)
    slices = sizes_of(start)
    for role in closed.roles:
        size, last = closed.attention.size(role), closed.counts[role] - 1
        wanted = exact[slices[role], slices[role]][last * size :, last * size :]
        assert_close(closed.factored(role, last).trace(), wanted.trace(), tolerance)
        assert_close(closed.factored(role, last).diagonal(), wanted.diagonal(), tolerance)
        top = top_eigenpairs(closed.factored(role, last), 1, which="largest").values[0]
        assert_close(top, torch.linalg.eigvalsh(wanted)[-1], 1e-6)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("Gemma2", "Invalid module Gemma2Attention: a soft cap bends its scores"),
        ("Olmo2", r"Invalid q_norm of Olmo2Attention, with gains of shape \(24,\)"),
        ("HunYuanDenseV1", "The output of HunYuanDenseV1Attention differs by"),  # rotates first
    ],
)
def test_families_without_a_closed_form(family, message):
    module, X, rotary = layer_of(family)
    with pytest.raises(ValueError, match=message):
        attention_hessian(module, X, SquaredError(torch.zeros_like(X)), rotary=rotary)


@pytest.mark.parametrize("decoder", [True, False])
def test_layers_that_say_they_are_not_causal(decoder):
    torch.manual_seed(4)
    kind = transformers.models.bigbird_pegasus.modeling_bigbird_pegasus
    module = kind.BigBirdPegasusDecoderAttention(WIDTH, 3, is_decoder=decoder).double()
    module.train().out_proj.eval()
    module.config = transformers.BigBirdPegasusConfig(attn_implementation="eager")
    X = torch.randn(BATCH, LENGTH, WIDTH).double()
    closed = attention_hessian(module, X, SquaredError(torch.zeros_like(X)))
    visible = CAUSAL if decoder else CAUSAL | CAUSAL.T
    assert torch.equal(closed.attention.heads[0].weights[0] > 0, visible)
    assert (module.training, module.out_proj.training) == (True, False)


def test_layers_that_compute_something_else():
    module, X, rotary = layer_of("Qwen3")
    loss = SquaredError(torch.zeros_like(X))
    handle = module.register_forward_hook(lambda *seen: (1.0001 * seen[2][0], None))
    with pytest.raises(ValueError, match="The output of Qwen3Attention differs by"):
        attention_hessian(module, X, loss, rotary=rotary)
    handle.remove()
    module.sinks = torch.zeros(6)
    with pytest.raises(ValueError, match="Qwen3Attention: part of its attention goes to sinks"):
        attention_hessian(module, X, loss, rotary=rotary)
    del module.sinks
    single = RotaryPositions(rotary.cos.float(), rotary.sin.float())
    with pytest.raises(ValueError, match=r"angles of torch\.float32.*cos\.to\(X\)"):
        attention_hessian(module, X, loss, rotary=single)
    with pytest.raises(ValueError, match="it has no map of role query, key, value, output"):
        attention_hessian(torch.nn.Linear(2, 2), X, loss)
