"""Layers with fused queries, keys and values equal their closed forms, inside whole models too."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockopt.analysis import (
    CrossEntropy,
    PositionwiseLoss,
    RotaryPositions,
    SquaredError,
    attention_hessian,
)
from recipes.common.gpt2 import GPT2, GPT2Config
from tests.helpers.attention_reference import assert_close, hessian

WIDTH, HEADS, LENGTH, BATCH, CLASSES = 8, 2, 4, 2, 7
SIZES = {"vocab_size": CLASSES, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2_SIZES = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": 2, "n_positions": 8}
USUAL = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 2,
         "intermediate_size": 16}  # fmt: skip


def one_after_another(weight, sizes=(WIDTH, WIDTH, WIDTH)):
    """Queries, keys and values of a map stored output first: (heads, WIDTH, head) each."""
    return [part.unflatten(0, (-1, 4)).mT for part in weight.split(sizes)]


def input_first(weight):
    return one_after_another(weight.T)


def interleaved(weight):
    return [part.mT for part in weight.unflatten(0, (HEADS, 3, 4)).unbind(1)]


def shared_keys(weight):
    return one_after_another(weight, (WIDTH, 4, 4))


# Family, options, where the layers and their attention are, the fused map, and how it is stored
FAMILIES = {
    "GPT-2": ("GPT2", GPT2_SIZES, "transformer.h.1.attn", "c_attn", input_first),
    "GPT-2, scaled by layer": (
        *("GPT2", GPT2_SIZES | {"scale_attn_by_inverse_layer_idx": True}),
        *("transformer.h.1.attn", "c_attn", input_first),
    ),
    "NeoX, interleaved, partial rotations": (
        *("GPTNeoX", USUAL | {"rope_parameters": {"partial_rotary_factor": 0.5,
          "rope_theta": 50.0, "rope_type": "default"}}),
        *("gpt_neox.layers.1.attention", "query_key_value", interleaved),
    ),
    "Phi-3, one key": (
        *("Phi3", USUAL | {"num_key_value_heads": 1}, "model.layers.1.self_attn", "qkv_proj"),
        shared_keys,
    ),
}  # fmt: skip


def in_float64(module):
    """Put norms that compute in the dtype of their input in place of those of transformers."""
    for name, child in module.named_children():
        if "RMSNorm" in type(child).__name__:
            norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon).double()
            setattr(module, name, norm)
        else:
            in_float64(child)
    return module


def whole_model(family, options):
    """A tiny model in float64 without any parameter at zero or one."""
    torch.manual_seed(4)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    config._attn_implementation = "sdpa"
    kind = next(k for k in ("LMHeadModel", "ForCausalLM") if hasattr(transformers, family + k))
    model = in_float64(getattr(transformers, family + kind)(config).double().eval())
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) / 3 + (parameter.ndim == 1)
    return model.requires_grad_(False)


@pytest.mark.parametrize("case", FAMILIES)
def test_the_last_layer_of_a_whole_model(case):
    family, options, place, fused, as_heads = FAMILIES[case]
    model = whole_model(family, options)
    attention = model.get_submodule(place)
    ids = torch.randint(CLASSES, (BATCH, LENGTH))
    seen = {}

    def remember(module, args, kwargs):
        seen.update(kwargs, hidden_states=args[0] if args else kwargs["hidden_states"])

    handle = attention.register_forward_pre_hook(remember, with_kwargs=True)
    model(ids, use_cache=False)
    handle.remove()

    def loss_of(logits):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def above(attended):  # all of the model, with another output of this layer
        handle = attention.register_forward_hook(lambda *_: (attended, None))
        try:
            return model(ids, use_cache=False).logits
        finally:
            handle.remove()

    angles = seen.get("position_embeddings")
    rotary = None if angles is None else RotaryPositions(*(angle.double() for angle in angles))
    loss = PositionwiseLoss(loss_of, above)
    closed = attention_hessian(attention, seen["hidden_states"], loss, rotary=rotary)

    output = next(n for n in ("c_proj", "dense", "o_proj") if hasattr(attention, n))
    names = [f"{place}.{fused}.weight", f"{place}.{output}.weight"]
    start = [model.get_parameter(name) for name in names]

    def loss_by_weights(vector):
        parts = vector.split([p.numel() for p in start])
        given = {name: part.view_as(p) for name, part, p in zip(names, parts, start)}
        return loss_of(functional_call(model, given, (ids,), {"use_cache": False}).logits)

    with sdpa_kernel(SDPBackend.MATH):
        exact = hessian(loss_by_weights)(torch.cat([p.flatten() for p in start]))
    # Where the entries of the closed form are stored
    numbers = torch.arange(len(exact))
    first, last = (n.view_as(p) for n, p in zip(numbers.split([p.numel() for p in start]), start))
    last = last if output == "c_proj" and family == "GPT2" else last.T
    places = torch.cat([*(part.flatten() for part in as_heads(first)), last.flatten()])
    assert_close(closed.dense(), exact[places][:, places])
    largest = torch.linalg.eigvalsh(closed.block("key", "key", heads=(0, 0)))[-1]
    assert_close(closed.factored("key", 0).top_eigenvalue(), largest, 1e-6)


class NanoAttention(nn.Module):
    """nanoGPT's layer."""

    def __init__(self, bias):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.n_head = HEADS

    def forward(self, x):
        heads = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, 2))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def our_own():
    config = GPT2Config(vocab_size=CLASSES, width=WIDTH, heads=HEADS, depth=1, context=LENGTH)
    return GPT2(config).h[0].attn


def torch_attention(batch_first, **options):
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **options)


LAYERS = {
    "nanoGPT": lambda: NanoAttention(bias=True),
    "nanoGPT without biases": lambda: NanoAttention(bias=False),
    "ours": our_own,
    "torch": lambda: torch_attention(True),
    "torch, sequence first": lambda: torch_attention(False, bias=False),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_alone(case):
    torch.manual_seed(5)
    module = LAYERS[case]().double().requires_grad_(False)
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) / 2
    X = torch.randn(BATCH, LENGTH, WIDTH).double()
    head, classes = torch.randn(WIDTH, CLASSES).double(), torch.randint(CLASSES, (BATCH, LENGTH))
    closed = attention_hessian(module, X, CrossEntropy(head, classes))
    named = dict(module.named_parameters())
    fused = next(n for n, p in named.items() if p.shape == (3 * WIDTH, WIDTH))
    output = next(n for n, p in named.items() if p.shape == (WIDTH, WIDTH))
    biases = [next((named[n] for n in named if named[n].shape == (k * WIDTH,)), torch.zeros(()))
              for k in (3, 1)]  # fmt: skip
    hidden = ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def loss_by_weights(vector):  # written out, since fused kernels have no second derivatives
        first, last = vector.split([3 * WIDTH**2, WIDTH**2])
        parts = (X @ first.view(3 * WIDTH, WIDTH).T + biases[0]).chunk(3, -1)
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in parts)
        A = (q @ k.mT / math.sqrt(WIDTH / HEADS)).masked_fill(hidden, -math.inf).softmax(-1)
        mixed = (A @ v).transpose(1, 2).flatten(2)
        logits = (mixed @ last.view(WIDTH, WIDTH).T + biases[1]) @ head
        return F.cross_entropy(logits.flatten(0, 1), classes.flatten())

    exact = hessian(loss_by_weights)(torch.cat([named[fused].flatten(), named[output].flatten()]))
    first, last = torch.arange(len(exact)).split([3 * WIDTH**2, WIDTH**2])
    parts = one_after_another(first.view(3 * WIDTH, WIDTH))
    places = torch.cat([*(p.flatten() for p in parts), last.view(WIDTH, WIDTH).T.flatten()])
    assert_close(closed.dense(), exact[places][:, places])


def test_masks_of_torch_attention():
    torch.manual_seed(6)
    module = torch_attention(True).double().requires_grad_(False)
    X = torch.randn(BATCH, LENGTH, WIDTH).double()
    visible = torch.rand(BATCH, LENGTH, LENGTH) < 0.6
    visible |= torch.eye(LENGTH, dtype=torch.bool)
    closed = attention_hessian(module, X, SquaredError(torch.zeros_like(X)), mask=visible)
    hidden = ~visible.repeat_interleave(HEADS, 0)
    assert_close(closed.attention.output, module(X, X, X, attn_mask=hidden)[0])


def test_what_cannot_be_read():
    X = torch.randn(BATCH, LENGTH, WIDTH).double()
    loss = SquaredError(torch.zeros_like(X))
    module = NanoAttention(bias=True).double()
    del module.n_head
    with pytest.raises(ValueError, match="NanoAttention does not say how many heads it has"):
        attention_hessian(module, X, loss)
    module = NanoAttention(bias=True).double()
    module.forward = lambda x, alibi: x
    with pytest.raises(ValueError, match=r"cannot be called as attention layers.*alibi"):
        attention_hessian(module, X, loss)
    module.forward = lambda x, position_ids=None: position_ids.device
    with pytest.raises(ValueError, match=r"cannot be called as attention layers.*NoneType"):
        attention_hessian(module, X, loss)
    module = nn.MultiheadAttention(WIDTH, HEADS, kdim=6).double()
    with pytest.raises(ValueError, match="no map of role query, key, value"):
        attention_hessian(module, X, loss)
    module = NanoAttention(bias=True).double()
    with pytest.raises(
        ValueError, match=r"The output of NanoAttention differs.*rotary, its layout, and mask"
    ):
        attention_hessian(module, X, loss, mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    module.gate = nn.Linear(WIDTH, WIDTH).double()
    with pytest.raises(ValueError, match="it has a map of role 'gate', which no closed form has"):
        attention_hessian(module, X, loss)
