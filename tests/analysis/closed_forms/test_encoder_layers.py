"""Attention layers of encoders, as their models call them, equal their closed forms."""

import pytest
import torch
import transformers
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockopt.analysis import RotaryPositions, SquaredError, attention_hessian
from tests.helpers.attention_reference import assert_close, hessian

WIDTH, HEADS, LENGTH, BATCH = 6, 3, 5, 2
USUAL = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2,
         "intermediate_size": 4}  # fmt: skip
TOKENS = {"vocab_size": 11, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {"dim": WIDTH, "n_heads": HEADS, "n_layers": 2, "hidden_dim": 4, "vocab_size": 11}
MODERN = {"hidden_size": 12, "cls_token_id": 1, "sep_token_id": 2}
WINDOW = {"local_attention": 4, "layer_types": ["full_attention", "sliding_attention"]}
IMAGE = {"image_size": 4, "patch_size": 2}
T5 = {"d_model": WIDTH, "d_kv": 2, "num_heads": HEADS, "num_layers": 2, "d_ff": 4,
      "decoder_start_token_id": 0}  # fmt: skip
# Family, options, the layer, its maps, and the tolerance: ModernBERT rotates in float32
ENCODERS = {
    "DistilBERT": (
        *("DistilBert", BERT, "transformer.layer.1.attention"),
        *("q_lin k_lin v_lin out_lin", 1e-10),
    ),
    "ViT": ("ViT", USUAL | IMAGE, "layers.1.attention", "q_proj k_proj v_proj o_proj", 1e-10),
    "ModernBERT": (
        *("ModernBert", USUAL | TOKENS | MODERN | WINDOW, "layers.1.attn"),
        *("Wqkv Wo", 1e-6),
    ),
}


def model_of(family, options):
    torch.manual_seed(2)
    config = getattr(transformers, f"{family}Config")(**options)
    config._attn_implementation = "sdpa"
    model = getattr(transformers, f"{family}Model")(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) / 2 + (parameter.ndim == 1)
    return model


def seen_by(model, place, given):
    """Return what a layer gets when the whole model is called."""
    seen = {}

    def remember(module, args, kwargs):
        seen.update(kwargs, hidden_states=args[0] if args else kwargs["hidden_states"])

    handle = model.get_submodule(place).register_forward_pre_hook(remember, with_kwargs=True)
    model(**given)
    handle.remove()
    return seen


@pytest.mark.parametrize(
    ("case", "padded"),
    [("DistilBERT", True), ("ViT", False), ("ModernBERT", False), ("ModernBERT", True)],
)
def test_layers_of_encoders(case, padded):
    family, options, place, maps, tolerance = ENCODERS[case]
    model = model_of(family, options)
    module = model.get_submodule(place)
    if family == "ViT":
        given = {"pixel_values": torch.randn(BATCH, 3, 4, 4).double()}
    else:
        given = {"input_ids": torch.randint(3, 11, (BATCH, LENGTH))}
        given["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
        given["attention_mask"][0, -2:] = 1 - padded
    seen = seen_by(model, place, given)
    X, target = seen.pop("hidden_states"), torch.randn(BATCH, LENGTH, model.config.hidden_size)
    target, mask = target.double(), seen.get("attention_mask")
    assert (mask is not None) == (padded or family == "ModernBert")
    angles = seen.get("position_embeddings")
    rotary = None if angles is None else RotaryPositions(*(angle.double() for angle in angles))
    handed = mask.expand(BATCH, 1, LENGTH, LENGTH)[:, 0] if padded else None
    closed = attention_hessian(module, X, SquaredError(target), rotary=rotary, mask=handed)

    names = [f"{name}.weight" for name in maps.split()]
    start = [module.get_parameter(name) for name in names]
    sizes = [p.numel() for p in start]
    numbers = torch.arange(sum(sizes)).split(sizes)  # where each weight is stored
    *first, last = (part.view_as(p) for part, p in zip(numbers, start))
    heads = [part.T.unflatten(1, (HEADS, -1)).movedim(1, 0) for part in torch.cat(first).chunk(3)]
    places = torch.cat([part.flatten() for part in (*heads, last.T)])

    def loss_of(vector):
        parts = vector.split(sizes)
        weights = {name: part.view_as(p) for name, part, p in zip(names, parts, start)}
        return (functional_call(module, weights, (X,), seen)[0] - target).square().mean()

    with sdpa_kernel(SDPBackend.MATH):
        exact = hessian(loss_of)(torch.cat([p.flatten() for p in start]))
    assert_close(closed.dense(), exact[places][:, places], tolerance)


@pytest.mark.parametrize(
    ("family", "options", "place"),
    [
        ("T5", T5 | TOKENS, "encoder.block.1.layer.0.SelfAttention"),
        ("Beit", USUAL | IMAGE | {"use_relative_position_bias": True}, "layers.1.attention"),
    ],
)
def test_biases_by_distance(family, options, place):
    module = model_of(family, options).get_submodule(place)
    X = torch.randn(BATCH, LENGTH, WIDTH).double()
    with pytest.raises(ValueError, match=f"{family}Attention: a learned bias for each distance"):
        attention_hessian(module, X, SquaredError(torch.zeros_like(X)))
