"""The same weights, however they are stored, get the same updates."""

import pytest
import torch
from torch import nn

import blockopt
from tests.helpers.attention_layouts import (
    HEAD_DIM,
    HEADS,
    ROLES,
    WIDTH,
    contiguous,
    conv1d,
    heads_of,
    interleaved,
    pack,
    random_values,
    separate,
    unpack_separate,
)
from tests.helpers.optimizers import OPTIMIZERS


def scales_for(blocks, scales):
    """Return the canonical scales {role: one per head} in the block order of a layout."""
    found = {}
    for name, entry in blocks.items():
        seen = dict.fromkeys(entry.roles, 0)
        values = []
        for role in entry.block_roles:
            values.append(scales[role][seen[role]] if role in scales else torch.tensor(1.0))
            seen[role] += 1
        found[name] = torch.stack(values)
    return found


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("kv", [HEADS, 2, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", [contiguous, conv1d, interleaved])
def test_update_does_not_depend_on_storage(layout, name, kv, per_head):
    results = []
    for build in (separate, layout):
        generator = torch.Generator().manual_seed(0)
        module = build(kv).double()
        with torch.no_grad():
            for parameter, value in random_values(module, build, generator, kv):
                parameter.copy_(value)
        blocks = blockopt.find_blocks(module, per_head=per_head)
        optimizer = OPTIMIZERS[name](blockopt.param_groups(module, blocks))
        scales = {
            role: torch.rand(heads_of(role, kv), generator=generator) + 0.5
            for role in (*ROLES, "output")
        }
        if not per_head:
            scales = {role: scale[:1] for role, scale in scales.items()}
        scales["output"] = torch.rand(HEADS, generator=generator) + 0.5
        optimizer.set_block_scales(scales_for(blocks, scales))
        for _ in range(3):
            for parameter, value in random_values(module, build, generator, kv):
                parameter.grad = value.clone(memory_format=torch.contiguous_format)
            optimizer.step()
        results.append({n: p.detach() for n, p in module.named_parameters()})
    expected = pack(layout, unpack_separate(results[0]), kv)
    for parameter_name, value in results[1].items():
        torch.testing.assert_close(value, expected[parameter_name], rtol=1e-12, atol=1e-12)


def test_torch_attention_is_contiguous_like_phi3():
    size = HEADS * HEAD_DIM
    found = blockopt.find_blocks(nn.MultiheadAttention(size, HEADS))
    assert found["in_proj_weight"].split == blockopt.Split(0, (size,) * 3, (HEADS,) * 3)
    unfused = blockopt.find_blocks(nn.MultiheadAttention(size, HEADS, kdim=WIDTH, vdim=WIDTH))
    assert [unfused[f"{x}_proj_weight"].roles for x in "qkv"] == [("query",), ("key",), ("value",)]


QKV = ("query", "key", "value")
SIZE = HEADS * HEAD_DIM
STACKED = {
    "outputs-first": ((3, SIZE, WIDTH), blockopt.Split(1, (SIZE,), (HEADS,), stack=3)),
    "by-head": ((3, HEADS, HEAD_DIM, WIDTH), blockopt.Split(1, (HEADS,), (HEADS,), stack=3)),
}


@pytest.mark.parametrize("name", ["adamw-block", "muon-block", "sgd"])
@pytest.mark.parametrize("storage", STACKED)
def test_matrices_of_different_roles_in_one_stack_are_updated_as_if_fused(storage, name):
    shape, split = STACKED[storage]
    fused = blockopt.Split(0, (SIZE,) * 3, (HEADS,) * 3)
    results = []
    for size, cut in (((3 * SIZE, WIDTH), fused), (shape, split)):
        generator = torch.Generator().manual_seed(0)
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(size).double())
        blocks = {"weight": blockopt.Blocks(QKV, None, cut)}
        options = {"precondition": False} if "muon" in name else {}
        optimizer = OPTIMIZERS[name](blockopt.param_groups(module, blocks), **options)
        scales = torch.rand(3 * HEADS, generator=generator) + 0.5
        optimizer.set_block_scales({"weight": scales})
        for _ in range(3):
            gradient = torch.randn(3 * SIZE, WIDTH, generator=generator).double()
            module.weight.grad = gradient.view(size)
            optimizer.step()
        results.append(module.weight.detach().view(3 * SIZE, WIDTH))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
