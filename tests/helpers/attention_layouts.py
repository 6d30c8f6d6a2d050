"""The same attention weights in the layouts that libraries store them in."""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

HEADS, HEAD_DIM, WIDTH = 4, 3, 10
ROLES = ("query", "key", "value")


def layer(name, kv, **linears):
    """A module of type `name` that holds attention projections."""
    module = type(name, (nn.Module,), {})()
    module.num_heads, module.head_dim, module.num_key_value_heads = HEADS, HEAD_DIM, kv
    for attribute, linear in linears.items():
        setattr(module, attribute, linear)
    return module


def heads_of(role, key_value_heads):
    return HEADS if role == "query" else key_value_heads


def separate(kv):
    q, k, v = (nn.Linear(WIDTH, HEAD_DIM * heads_of(role, kv)) for role in ROLES)
    o = nn.Linear(HEADS * HEAD_DIM, WIDTH)
    return layer("LlamaAttention", kv, q_proj=q, k_proj=k, v_proj=v, o_proj=o)


def contiguous(kv):
    fused = nn.Linear(WIDTH, HEAD_DIM * (HEADS + 2 * kv))
    return layer("Phi3Attention", kv, qkv_proj=fused, o_proj=nn.Linear(HEADS * HEAD_DIM, WIDTH))


def conv1d(kv):
    fused = Conv1D(HEAD_DIM * (HEADS + 2 * kv), WIDTH)
    return layer("GPT2Attention", kv, c_attn=fused, c_proj=Conv1D(WIDTH, HEADS * HEAD_DIM))


def interleaved(kv):
    fused = nn.Linear(WIDTH, HEAD_DIM * (HEADS + 2 * kv))
    output = nn.Linear(HEADS * HEAD_DIM, WIDTH)
    return layer("FalconAttention", kv, query_key_value=fused, dense=output)


def interleave(parts, kv):
    """Put the queries of a group, its key and its value side by side, for each key-value head."""
    query, key, value = (p.unflatten(0, (kv, -1)) for p in parts)
    return torch.cat([query, key, value], dim=1).flatten(0, 1)


def pack(layout, weights, kv):
    """Return canonical {query, key, value, output and their biases} as a layout's parameters."""
    qkv, biases = [weights[role] for role in ROLES], [weights[f"{role} bias"] for role in ROLES]
    output = (weights["output"], weights["output bias"])
    if layout is separate:
        names = ("q_proj", "k_proj", "v_proj")
        stored = dict(zip(names, zip(qkv, biases))) | {"o_proj": output}
    elif layout is contiguous:
        stored = {"qkv_proj": (torch.cat(qkv), torch.cat(biases)), "o_proj": output}
    elif layout is conv1d:
        stored = {
            "c_attn": (torch.cat(qkv).T, torch.cat(biases)),
            "c_proj": (output[0].T, output[1]),
        }
    else:
        fused = (interleave(qkv, kv), interleave(biases, kv))
        stored = {"query_key_value": fused, "dense": output}
    return {
        f"{name}.{suffix}": value
        for name, pair in stored.items()
        for suffix, value in zip(("weight", "bias"), pair)
    }


def canonical(generator, kv):
    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = {role: normal(HEAD_DIM * heads_of(role, kv), WIDTH) for role in ROLES}
    weights |= {f"{role} bias": normal(HEAD_DIM * heads_of(role, kv)) for role in ROLES}
    return weights | {"output": normal(WIDTH, HEADS * HEAD_DIM), "output bias": normal(WIDTH)}


def random_values(module, build, generator, kv):
    """Pair the parameters of a module with random values that do not depend on its layout."""
    parameters = dict(module.named_parameters())
    stored = pack(build, canonical(generator, kv), kv)
    assert parameters.keys() == stored.keys()
    return [(parameters[name], value) for name, value in stored.items()]


def unpack_separate(stored):
    """Return canonical weights from the parameters of the layout `separate`."""
    weights = {"output": stored["o_proj.weight"], "output bias": stored["o_proj.bias"]}
    for role, attribute in zip(ROLES, ("q_proj", "k_proj", "v_proj")):
        weights[role] = stored[f"{attribute}.weight"]
        weights[f"{role} bias"] = stored[f"{attribute}.bias"]
    return weights
