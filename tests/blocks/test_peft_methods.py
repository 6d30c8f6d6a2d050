"""Every method of PEFT: adapters have the role, layer and heads of a layer, or are refused."""

import peft
import pytest
import torch

from blockopt import find_blocks
from blockopt.blocks import UnknownBlocksError
from tests.helpers.expected_blocks import cut, rows, whole
from tests.helpers.models import FAMILIES, block_index

TARGETS = ["q_proj", "o_proj", "down_proj"]
START = "base_model.model.model.layers.1."
# Which of a method's tensors are cut by head: of the query projection, and of the output one.
METHODS = {
    "vera": (peft.VeraConfig, {"r": 4, "target_modules": ["q_proj"]}, {"vera_lambda_b"}, set()),
    "loha": (
        peft.LoHaConfig,
        {"r": 2},
        {"hada_w1_a", "hada_w2_a"},
        {"hada_w1_b", "hada_w2_b"},
    ),
    "lokr": (peft.LoKrConfig, {"r": 2}, {"lokr_w1"}, {"lokr_w1"}),
    "adalora": (
        peft.AdaLoraConfig,
        {"init_r": 3, "target_r": 2, "total_step": 100},
        {"lora_B"},
        {"lora_A"},
    ),
    "dora": (
        peft.LoraConfig,
        {"r": 2, "use_dora": True},
        {"lora_B", "lora_magnitude_vector"},
        None,
    ),
    "oft": (peft.OFTConfig, {"oft_block_size": 4, "r": 0}, set(), {"oft_R"}),
    "boft": (peft.BOFTConfig, {"boft_block_size": 4}, {"boft_s"}, set()),
    "miss": (peft.MissConfig, {"r": 4}, {"miss_block"}, set()),
    "hira": (peft.HiraConfig, {"r": 2}, {"hira_B"}, {"hira_A"}),
    "fourier": (peft.FourierFTConfig, {"n_frequency": 8}, set(), set()),
    "householder": (peft.HRAConfig, {"r": 2}, set(), set()),
    "circulant": (peft.C3AConfig, {"block_size": 4}, set(), set()),
    "sparse": (peft.ShiraConfig, {"r": 2}, set(), set()),
}


def adapted(config, family="llama"):
    torch.manual_seed(0)
    model = peft.get_peft_model(FAMILIES[family](), config).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:  # nothing is zero, so that every change shows
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def matrix_of(layer):
    with torch.no_grad():
        return layer(torch.eye(layer.in_features)).T


@pytest.mark.filterwarnings("ignore")  # those of PEFT
@pytest.mark.parametrize("name", METHODS)
def test_adapters_have_the_role_and_layer_and_each_block_moves_one_head(name):
    kind, options, in_query, in_output = METHODS[name]
    model = adapted(kind(**{"target_modules": TARGETS, **options}))
    blocks = find_blocks(model)
    attention = model.base_model.model.model.layers[1].self_attn
    for projection, role, head_dim, cut_tensors in (
        ("q_proj", "query", 0, in_query),
        ("o_proj", "output", 1, in_output),
    ):
        start = f"{START}self_attn.{projection}."
        found = {n.removeprefix(start): b for n, b in blocks.items() if n.startswith(start)}
        assert found or projection not in options.get("target_modules", TARGETS)
        assert {(entry.roles, entry.layer) for entry in found.values()} <= {((role,), 1)}
        if cut_tensors is None:  # DoRA's norms tie the inputs of all heads together
            continue
        by_head = {n: entry for n, entry in found.items() if entry.num_blocks > 1}
        assert {n.split(".")[0] for n in by_head} == cut_tensors
        layer = getattr(attention, projection)
        before = matrix_of(layer)
        for tensor_name, entry in by_head.items():
            parameter = model.get_parameter(start + tensor_name)
            index = block_index(tuple(parameter.shape), entry.split)
            for head in range(4):
                original = parameter.detach().clone()
                parameter.data += 0.5 * (index == head)
                changed = (matrix_of(layer) - before).abs().amax(dim=1 - head_dim) > 1e-6
                parameter.data.copy_(original)
                heads = changed.unflatten(0, (4, -1)).any(dim=1).nonzero().flatten().tolist()
                assert heads == [head], f"{tensor_name}: block {head}"
    assert not any("other" in entry.roles for entry in blocks.values())


def test_factors_of_stacked_experts_have_the_roles_of_their_matrices():
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    model = adapted(config, "mixtral")
    blocks = find_blocks(model)
    found = {n.removeprefix(f"{START}mlp.experts."): b for n, b in blocks.items() if START in n}
    assert found == {
        "base_layer.lora_A.default.weight": cut(0, mlp_in=(6, 3))._replace(layer=1),
        "base_layer.lora_B.default.weight": cut(0, mlp_gate=(24, 24), mlp_in=(24, 24))._replace(
            layer=1
        ),
        "lora_A.default.weight": cut(0, mlp_out=(6, 3))._replace(layer=1),
        "lora_B.default.weight": rows("mlp_out", 16)._replace(layer=1),
    }
    wrapper = model.base_model.model.model.layers[1].mlp.experts  # of the second matrix
    index = block_index((6, 24), found["lora_A.default.weight"].split)
    before = wrapper.get_delta_weight("default")
    for expert in range(3):
        factor = wrapper.lora_A["default"].weight
        original = factor.detach().clone()
        factor.data += 1.0 * (index == expert)
        changed = (wrapper.get_delta_weight("default") - before).abs().amax(dim=(1, 2)) > 1e-6
        factor.data.copy_(original)
        assert changed.nonzero().flatten().tolist() == [expert]


def test_factors_and_magnitudes_of_a_conv1d_are_cut_like_its_outputs():
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn", "c_fc"], use_dora=True, fan_in_fan_out=True
    )
    start = "base_model.model.transformer.h.1."
    blocks = find_blocks(adapted(config, "gpt2"))
    fused = cut(0, query=(16, 4), key=(16, 4), value=(16, 4))._replace(layer=1)
    for name in ("lora_B.default.weight", "lora_magnitude_vector.default.weight"):
        assert blocks[f"{start}attn.c_attn.{name}"] == fused
        assert blocks[f"{start}mlp.c_fc.{name}"] == rows("mlp_in", 64)._replace(layer=1)
    assert blocks[f"{start}attn.c_attn.lora_A.default.weight"] == whole("value")._replace(layer=1)


def test_chosen_tokens_are_rows_of_the_embedding():
    for config in (
        peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 5]),
        peft.TrainableTokensConfig(token_indices=[1, 5]),
    ):
        blocks = find_blocks(adapted(config))
        (name,) = (n for n in blocks if "trainable_tokens_delta" in n)
        assert blocks[name] == rows("embedding", 2)


def test_p_tuning_is_an_embedding_and_an_mlp():
    config = peft.PromptEncoderConfig(
        num_virtual_tokens=3, task_type="CAUSAL_LM", encoder_hidden_size=8
    )
    blocks = find_blocks(adapted(config))
    roles = [b.roles[0] for n, b in blocks.items() if n.endswith("weight")]
    assert roles == ["embedding", "mlp_in", "mlp_in", "mlp_out"]


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_the_biases_of_factors_are_cut_like_the_outputs():
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True)
    blocks = find_blocks(adapted(config))
    name = f"{START}self_attn.q_proj.lora_B.default.bias"
    assert blocks[name] == cut(0, bias=(16, 4))._replace(layer=1)


def test_what_adapters_of_several_roles_share_is_refused_with_an_override():
    config = peft.VBLoRAConfig(
        num_vectors=8, vector_length=4, r=2, topk=2, target_modules=["q_proj", "o_proj"]
    )
    model = adapted(config)
    with pytest.raises(UnknownBlocksError, match="adapters of output and query share") as refused:
        find_blocks(model)
    blocks = find_blocks(model, overrides=refused.value.overrides)
    assert {entry.roles for entry in blocks.values()} == {("query",), ("output",), ("other",)}


def test_an_lstm_that_makes_prompts_is_said_to_have_no_role():
    config = peft.PromptEncoderConfig(
        num_virtual_tokens=3,
        task_type="CAUSAL_LM",
        encoder_hidden_size=8,
        encoder_reparameterization_type="LSTM",
    )
    with pytest.warns(UserWarning, match=r"no role in a transformer, most of them in .* \(LSTM, "):
        find_blocks(adapted(config))
