"""Mixtures of experts: every expert's matrix is cut for itself, and each row is one neuron."""

import pytest
import torch
import transformers
from torch import nn

from blockopt import Blocks, Split, find_blocks, param_groups
from blockopt.blocks import UnknownBlocksError
from tests.helpers.models import LLAMA_SIZES, block_index


def gpt_oss():
    config = transformers.GptOssConfig(
        **LLAMA_SIZES, num_local_experts=3, num_experts_per_tok=2, head_dim=4
    )
    return transformers.GptOssForCausalLM(config)


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(
        **LLAMA_SIZES, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=12
    )
    return transformers.Qwen3MoeForCausalLM(config)


def entry(model, ending):
    return next(b for name, b in find_blocks(model).items() if name.endswith(ending))


def test_interleaved_gate_and_input_stored_input_first():
    model = gpt_oss()
    assert entry(model, "experts.gate_up_proj") == Blocks(
        ("mlp_gate", "mlp_in"), 0, Split(2, (1, 1), (1, 1), repeat=24, stack=3)
    )
    assert entry(model, "experts.down_proj") == Blocks(
        ("mlp_out",), 0, Split(2, (16,), (16,), stack=3)
    )
    assert entry(model, "router.weight").roles == ("router",)


def test_biases_of_experts_are_biases_and_do_not_decay():
    model = gpt_oss()
    bias = entry(model, "experts.gate_up_proj_bias")
    assert bias == Blocks(("bias", "bias"), 0, Split(1, (1, 1), (1, 1), repeat=24, stack=3))
    decays = {
        n: g["weight_decay"] for g in param_groups(model, weight_decay=0.3) for n, _ in g["params"]
    }
    assert {d for n, d in decays.items() if "bias" in n} == {0.0}
    assert {d for n, d in decays.items() if n.endswith(("experts.down_proj", "q_proj.weight"))} == {
        0.3
    }


@pytest.mark.parametrize("build", [gpt_oss, qwen3_moe])
def test_a_block_of_the_input_is_one_neuron_of_one_expert(build):
    torch.manual_seed(0)
    model = build()
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn_like(p))
    name = next(n for n, p in model.named_parameters() if p is experts.gate_up_proj)
    layout, weight = find_blocks(model)[name], experts.gate_up_proj
    index = block_index(tuple(weight.shape), layout.split)
    x = torch.randn(4, 16)
    chosen, scores = torch.full((4, 1), 1), torch.ones(4, 1)  # all tokens to expert 1

    def run():
        with torch.no_grad():
            return experts(x, chosen, scores)

    before = run()
    reached = {"mlp_gate": 0, "mlp_in": 0}
    for block, role in enumerate(layout.block_roles):
        original = weight.detach().clone()
        weight.data[index == block] *= 1.5
        changed = not torch.equal(run(), before)
        weight.data.copy_(original)
        assert changed == (block // (layout.num_blocks // 3) == 1)
        reached[role] += changed
    assert reached["mlp_gate"] == reached["mlp_in"] == layout.num_blocks // 6


def test_experts_in_a_list_are_mlps_and_their_router_is_one():
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 3, bias=False)
            self.experts = nn.ModuleList(Expert() for _ in range(3))
            self.shared_expert, self.shared_expert_gate = Expert(), nn.Linear(8, 1, bias=False)

    blocks = find_blocks(nn.ModuleList([Mixture(), Mixture()]))
    assert (
        blocks["1.gate.weight"].roles == blocks["1.shared_expert_gate.weight"].roles == ("router",)
    )
    assert blocks["1.experts.2.up.weight"] == Blocks(("mlp_in",), 1, Split(0, (32,), (32,)))
    assert blocks["1.shared_expert.down.weight"].roles == ("mlp_out",)


def test_stacked_queries_keys_and_values_are_no_experts():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("wq", "wk", "wv"):
                setattr(self, name, nn.Parameter(torch.zeros(3, 8, 4)))
            self.wo = nn.Parameter(torch.zeros(3, 4, 8))

    with pytest.raises(UnknownBlocksError, match="stores wq in three dimensions") as refused:
        find_blocks(Heads())
    roles = {n: b.roles for n, b in find_blocks(Heads(), overrides=refused.value.overrides).items()}
    expected = {"wq": ("query",), "wk": ("key",), "wv": ("value",), "wo": ("output",)}
    assert roles == expected
