"""Adapters of PEFT have the role, the layer and the heads of the layer that they adapt."""

import peft
import pytest
import torch
from torch import nn

from blockopt import BlockMuon, find_blocks, param_groups
from tests.helpers.expected_blocks import cut, rows, whole
from tests.helpers.models import CAUSAL, FAMILIES, loss_of

EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(config, family="llama"):
    return peft.get_peft_model(FAMILIES[family](), config)


def by_ending(blocks, layer=0):
    """The blocks of one layer by the last parts of their names."""
    start = f"base_model.model.model.layers.{layer}."
    return {n.removeprefix(start): b for n, b in blocks.items() if n.startswith(start)}


def test_each_factor_is_cut_on_the_side_that_has_the_heads_or_neurons():
    found = by_ending(find_blocks(adapted(peft.LoraConfig(r=2, target_modules=EVERYTHING))))
    expected = {
        "self_attn.q_proj": (whole("query"), cut(0, query=(16, 4))),
        "self_attn.k_proj": (whole("key"), cut(0, key=(8, 2))),
        "self_attn.v_proj": (whole("value"), cut(0, value=(8, 2))),
        "self_attn.o_proj": (cut(1, output=(16, 4)), whole("output")),
        "mlp.gate_proj": (whole("mlp_gate"), rows("mlp_gate", 24)),
        "mlp.up_proj": (whole("mlp_in"), rows("mlp_in", 24)),
        "mlp.down_proj": (whole("mlp_out"), rows("mlp_out", 16)),
    }
    assert len(found) == 2 * len(expected)
    for name, factors in expected.items():
        for letter, blocks in zip("AB", factors):
            key = f"{name}.lora_{letter}.default.weight"
            assert found[key] == blocks._replace(layer=0), key


def test_scaling_a_head_of_a_factor_changes_that_head_of_the_adapted_layer_alone():
    model = adapted(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.default.weight"
    split, factor = find_blocks(model)[name].split, layer.lora_B["default"].weight
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    before = layer(x).detach()
    for head in range(split.num_blocks):
        original = factor.detach().clone()
        factor.data.unflatten(0, (4, -1))[head] *= 2
        changed = (layer(x).detach() - before).unflatten(1, (4, -1)).abs().amax((0, 2))
        factor.data.copy_(original)
        assert changed.nonzero().flatten().tolist() == [head]


def test_dora_magnitudes_are_cut_like_the_outputs():
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], use_dora=True)
    found = by_ending(find_blocks(adapted(config)))
    key = "self_attn.{}.lora_magnitude_vector.default.weight"
    assert found[key.format("q_proj")] == cut(0, query=(16, 4))._replace(layer=0)
    assert found[key.format("o_proj")] == whole("output")._replace(layer=0)


def test_ia3_vectors_are_cut_by_head():
    config = peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    model = adapted(config)
    found = by_ending(find_blocks(model))
    assert found["self_attn.k_proj.ia3_l.default"] == cut(0, key=(8, 2))._replace(layer=0)
    assert found["self_attn.v_proj.ia3_l.default"] == cut(0, value=(8, 2))._replace(layer=0)
    assert found["mlp.down_proj.ia3_l.default"].roles == ("mlp_out",)
    groups = param_groups(model, weight_decay=0.1)
    assert {group["weight_decay"] for group in groups} == {0.0}  # gains are vectors


@pytest.mark.parametrize("projection", [False, True])
def test_prefixes_are_keys_and_values_of_every_layer(projection):
    config = peft.PrefixTuningConfig(
        num_virtual_tokens=3,
        task_type="CAUSAL_LM",
        prefix_projection=projection,
        encoder_hidden_size=8,
    )
    model = adapted(config, "gpt2")
    blocks = find_blocks(model)
    last = "transform.2.weight" if projection else "embedding.weight"
    entry = blocks[f"prompt_encoder.default.{last}"]
    expected = cut(0 if projection else 1, key=(16, 4), value=(16, 4), repeat=2)
    assert entry.roles == ("key", "value")
    assert entry.split == expected.split


def test_a_prompt_is_an_embedding_of_tokens():
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    blocks = find_blocks(adapted(config, "gpt2"))
    assert [b.roles for b in blocks.values()] == [("embedding",)]


def test_modules_that_are_saved_whole_keep_their_roles_and_heads():
    saved = ["lm_head", "k_proj", "mlp"]
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved)
    blocks = find_blocks(adapted(config))
    found = {n.replace(".modules_to_save.default", ""): b for n, b in blocks.items()}
    start = "base_model.model.model.layers.1."
    assert found["base_model.model.lm_head.weight"] == rows("head", 20)
    assert found[f"{start}self_attn.k_proj.weight"] == cut(0, key=(8, 2))._replace(layer=1)
    assert found[f"{start}mlp.down_proj.weight"] == rows("mlp_out", 16)._replace(layer=1)


def test_factors_of_an_embedding_are_cut_by_token():
    config = peft.LoraConfig(r=2, target_modules=["wte"])
    blocks = find_blocks(peft.get_peft_model(CAUSAL["gpt2"](), config))
    found = {n.split(".")[-2]: b for n, b in blocks.items()}
    assert found["lora_embedding_A"] == rows("embedding", 20, dim=1)
    assert found["lora_embedding_B"] == whole("embedding")


class LowRankLinear(nn.Linear):
    """Factors beside the weight, as hand-written LoRA has them."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, bias=False)
        self.weight.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(2, inputs))
        self.lora_B = nn.Parameter(torch.zeros(outputs, 2))


def test_factors_written_by_hand_have_the_role_of_the_weight_beside_them():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = 2
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
                LowRankLinear(8, 8) for _ in range(4)
            )

    blocks = find_blocks(Attention())
    assert len(blocks) == 8
    assert blocks["v_proj.lora_B"] == cut(0, value=(8, 2))
    assert blocks["o_proj.lora_A"] == cut(1, output=(8, 2))


def test_muon_takes_every_factor_and_trains():
    model = adapted(peft.LoraConfig(r=2, target_modules=EVERYTHING))
    optimizer = BlockMuon(param_groups(model), lr=1e-2)
    assert optimizer.muon_share == 1.0
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of("llama", model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_adapters_that_a_net_weighs_have_roles_and_so_has_the_net(tmp_path):
    for name in "01":
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"])
        adapted(config).save_pretrained(tmp_path / name)
    base = CAUSAL["llama"]()
    base.config.use_cache = False
    adapters = {name: str(tmp_path / name) for name in "01"}
    config = peft.XLoraConfig(
        task_type="CAUSAL_LM",
        hidden_size=16,
        adapters=adapters,
        xlora_depth=2,
        xlora_size=24,
        use_trainable_adapters=True,
    )
    model = peft.get_peft_model(base, config)
    blocks = find_blocks(model)
    start = "base_model.lora_model.model.model.layers.1.self_attn."
    for name in "01":
        assert blocks[f"{start}q_proj.lora_B.{name}.weight"] == cut(0, query=(16, 4))._replace(
            layer=1
        )
        assert blocks[f"{start}o_proj.lora_A.{name}.weight"] == cut(1, output=(16, 4))._replace(
            layer=1
        )
    net = [b for n, b in blocks.items() if "xlora_classifier" in n and n.endswith("weight")]
    assert [entry.roles for entry in net] == [("mlp_in",), ("router",)]
    tokens = torch.randint(20, (2, 5))
    assert find_blocks(model, example={"input_ids": tokens}) == blocks
