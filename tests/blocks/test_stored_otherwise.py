"""Weights that are stored otherwise than as one matrix, and what does not decay."""

import warnings

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations

from blockopt import Split, find_blocks, param_groups
from tests.helpers.every_model import build_transformers
from tests.helpers.expected_blocks import cut
from tests.helpers.models import timm_vit


class Attention(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            wrap(nn.Linear(8, 8, bias=False)) for _ in range(4)
        )


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_weights_have_the_roles_of_the_weight(wrap):
    model = Attention(wrap)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    blocks = find_blocks(model)
    original = "original1" if wrap is parametrizations.weight_norm else "original"
    start = "parametrizations.weight."
    assert blocks[f"q_proj.{start}{original}"] == cut(0, query=(8, 2))
    assert blocks[f"o_proj.{start}{original}"] == cut(1, output=(8, 2))
    if wrap is parametrizations.weight_norm:
        assert blocks[f"q_proj.{start}original0"] == cut(0, query=(8, 2))
        assert blocks[f"o_proj.{start}original0"].roles == ("output",)
    for name, value in model.named_buffers():  # the weight was not computed
        assert torch.equal(value, buffers[name])


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_the_old_weight_norm_and_spectral_norm():
    blocks = find_blocks(Attention(nn.utils.weight_norm))
    assert blocks["v_proj.weight_v"] == blocks["v_proj.weight_g"] == cut(0, value=(8, 2))
    blocks = find_blocks(Attention(nn.utils.spectral_norm))
    assert blocks["v_proj.weight_orig"] == cut(0, value=(8, 2))


def test_convolutions_over_single_points_are_linear_maps():
    model = nn.Module()
    model.num_heads = 2
    model.qkv, model.proj = nn.Conv2d(8, 24, 1), nn.Conv2d(8, 8, 1)
    blocks = find_blocks(model)
    assert blocks["qkv.weight"] == cut(0, query=(8, 2), key=(8, 2), value=(8, 2))
    assert blocks["proj.weight"] == cut(1, output=(8, 2))


def decays(model):
    groups = param_groups(model, weight_decay=0.3)
    return {name: group["weight_decay"] > 0 for group in groups for name, _ in group["params"]}


def test_tokens_and_positions_do_not_decay():
    found = decays(timm_vit(reg_tokens=3))
    assert not any(found[name] for name in ("cls_token", "reg_token", "pos_embed"))
    assert found["patch_embed.proj.weight"]
    assert found["blocks.0.attn.qkv.weight"]


def test_what_the_model_excludes_does_not_decay():
    model = timm_vit()
    model.no_weight_decay = lambda: {"head.weight", "blocks.0.mlp.*"}
    found = decays(nn.ModuleDict({"inside": model}))
    assert not found["inside.head.weight"]
    assert not found["inside.blocks.0.mlp.fc1.weight"]
    assert found["inside.blocks.1.mlp.fc1.weight"]


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "jamba", "falcon_mamba"])
def test_time_constants_do_not_decay(kind):
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = decays(model)
    constants = [n for n in found if n.endswith(("A_log", ".D")) or ".dt" in n]
    assert constants
    assert not any(found[name] for name in constants)
    assert all(found[name] for name in found if name.endswith("in_proj.weight"))


def test_steps_of_zamba_in_one_parameter_do_not_decay():
    found = decays(build_transformers("zamba"))
    assert not found["model.layers.0.mamba.dt_proj_weight"]
    assert found["model.layers.0.mamba.x_proj_weight"]


@pytest.mark.parametrize("family", ["Lfm2", "Lfm2Moe"])
def test_a_convolution_between_gates_has_the_roles_of_attention(family):
    config = getattr(transformers, f"{family}Config")(
        **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 20},
        **{"num_attention_heads": 2, "num_key_value_heads": 2},
        layer_types=["conv", "full_attention"],
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{family}Model")(config)
    blocks = find_blocks(model)
    entry = blocks["layers.0.conv.in_proj.weight"]
    assert entry.roles == ("gate", "gate", "value")
    assert entry.split == Split(0, (16,) * 3, (1,) * 3)
    assert blocks["layers.0.conv.out_proj.weight"].roles == ("output",)


def test_what_mobilebert_adds_to_its_embedding_in_the_head_has_a_column_for_each_token():
    config = transformers.MobileBertConfig(
        **{"vocab_size": 20, "hidden_size": 16, "embedding_size": 6, "num_hidden_layers": 1},
        **{"intra_bottleneck_size": 8, "intermediate_size": 12, "num_attention_heads": 2},
    )
    model = transformers.MobileBertForMaskedLM(config)
    for example in (None, torch.arange(20).view(2, 10)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # bottlenecks have no role
            blocks = find_blocks(model, example=example)
        assert blocks["cls.predictions.dense.weight"] == cut(1, head=(20, 20))


def test_a_table_of_attention_biases_is_one_of_positions():
    config = transformers.LevitConfig(num_labels=2)
    with torch.device("meta"):
        model = transformers.LevitForImageClassification(config)
    blocks = find_blocks(model)
    tables = [name for name in blocks if name.endswith("attention_biases")]
    assert tables
    assert all(blocks[name].roles == ("position",) for name in tables)


def test_mamba_has_the_roles_of_attention():
    config = transformers.Mamba2Config(
        hidden_size=16,
        num_heads=4,
        head_dim=8,
        state_size=6,
        n_groups=2,
        num_hidden_layers=2,
        vocab_size=20,
    )
    blocks = find_blocks(transformers.Mamba2ForCausalLM(config))
    entry = blocks["backbone.layers.1.mixer.in_proj.weight"]
    assert entry.roles == ("gate", "value", "key", "query", "gate")
    assert entry.split == Split(0, (32, 32, 12, 12, 4), (4, 4, 2, 2, 4))
    output = blocks["backbone.layers.1.mixer.out_proj.weight"]
    assert output == cut(1, output=(32, 4))._replace(layer=1)


def test_much_without_a_role_warns_once_and_names_the_modules():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    with pytest.warns(UserWarning, match=r"98% .* no role .* in '\*\.weight' \(Conv2d, 98%\)\."):
        find_blocks(model)
    find_blocks(model)
