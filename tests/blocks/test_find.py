"""The block finder against tables written by hand: roles, and where parameters are cut."""

import pytest
import torch
from torch import nn

from blockopt import Split, find_blocks
from blockopt.blocks import ROLES, block_numel
from tests.helpers.expected_blocks import ATTENTION, EXPECTED, rows, section_roles
from tests.helpers.models import CAUSAL, FAMILIES, block_index


def test_every_family_has_a_table():
    assert EXPECTED.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_finds_the_blocks_of_the_table(name):
    found = find_blocks(FAMILIES[name]())
    assert found.keys() == EXPECTED[name].keys()
    for parameter, blocks in EXPECTED[name].items():
        assert found[parameter] == blocks, parameter


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_covers_every_trainable_parameter_once_and_every_entry_once(name, per_head):
    model = FAMILIES[name]()
    blocks = find_blocks(model, per_head=per_head)
    trainable = {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    assert list(blocks) == list(trainable)
    for parameter, shape in trainable.items():
        entry = blocks[parameter]
        entry.check(shape)
        index = block_index(shape, entry.split)
        assert set(index.flatten().tolist()) == set(range(entry.num_blocks))
        assert len(entry.block_roles) == entry.num_blocks
        assert set(entry.block_roles) <= set(ROLES)


@pytest.mark.parametrize("name", ATTENTION)
def test_without_heads_each_role_is_one_block_of_the_same_entries(name):
    model = FAMILIES[name]().requires_grad_(True)
    by_head, merged = find_blocks(model), find_blocks(model, per_head=False)
    for parameter, p in model.named_parameters():
        fine, coarse = by_head[parameter], merged[parameter]
        assert coarse.roles == fine.roles
        if set(fine.roles) & {"query", "key", "value", "output"}:
            assert sorted(coarse.block_roles) == sorted(set(fine.roles))
            fine_index, coarse_index = (
                block_index(tuple(p.shape), b.split) for b in (fine, coarse)
            )
            for role in set(fine.roles):
                of_role = [i for i, r in enumerate(fine.block_roles) if r == role]
                assert torch.equal(
                    torch.isin(fine_index, torch.tensor(of_role)),
                    coarse_index == coarse.block_roles.index(role),
                )
        elif section_roles(parameter, by_head) is not None:
            assert coarse.num_blocks == len(fine.roles)
        else:
            assert coarse == fine


def test_merged_interleaved_heads_are_pooled():
    merged = find_blocks(FAMILIES["gpt_neox"](), per_head=False)
    blocks = merged["gpt_neox.layers.0.attention.query_key_value.weight"]
    assert blocks.block_roles == ("query", "key", "value")
    assert blocks.split == Split(0, (4, 4, 4), (1, 1, 1), repeat=4, pooled=True)
    assert block_numel((48, 16), blocks.split).tolist() == [256, 256, 256]


UNTIED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "gpt_neox")
TIED = {
    "nanogpt": ("wte.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "bloom": ("transformer.word_embeddings.weight", "lm_head.weight"),
    "opt": ("model.decoder.embed_tokens.weight", "lm_head.weight"),
    "bert": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    "t5": ("shared.weight", "lm_head.weight"),
}


@pytest.mark.parametrize("name", TIED)
def test_a_tied_head_counts_once_as_embedding(name):
    model, (embedding, head) = FAMILIES[name](), TIED[name]
    assert model.get_parameter(embedding) is model.get_parameter(head)
    blocks = find_blocks(model)
    assert blocks[embedding].roles == ("embedding",)
    assert head not in blocks
    assert not any("head" in entry.roles for entry in blocks.values())


@pytest.mark.parametrize("name", UNTIED)
def test_tying_by_hand_turns_the_head_into_the_embedding(name):
    model = FAMILIES[name]()
    assert "head" in {role for entry in find_blocks(model).values() for role in entry.roles}
    model.set_output_embeddings(nn.Linear(16, 20, bias=False))
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    assert "head" not in {role for entry in find_blocks(model).values() for role in entry.roles}


def test_a_head_registered_before_the_embedding_it_shares_is_still_embedding():
    model = nn.Module()
    model.lm_head = nn.Linear(4, 6, bias=False)
    model.wte = nn.Embedding(6, 4)
    model.wte.weight = model.lm_head.weight
    assert find_blocks(model) == {"lm_head.weight": rows("embedding", 6)}


@pytest.mark.parametrize("name", ["gpt2", "llama", "encoder_layer"])
def test_frozen_parameters_are_left_out(name):
    model = FAMILIES[name]()
    everything = find_blocks(model)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in parameter_name or "linear" in parameter_name)
    kept = {n: b for n, b in everything.items() if "mlp" in n or "linear" in n}
    assert 0 < len(kept) < len(everything)
    assert find_blocks(model) == kept
    assert find_blocks(model.requires_grad_(False)) == {}


class Wrapper(nn.Module):
    """Holds a model as `DistributedDataParallel` does."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


# torch.compile imports code that torch itself has deprecated.
compiles = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)
WRAPPERS = {
    "module.": Wrapper,
    "_orig_mod.": torch.compile,
    "module._orig_mod.": lambda model: Wrapper(torch.compile(model)),
    "_orig_mod.module.": lambda model: torch.compile(Wrapper(model)),
}


@compiles
@pytest.mark.parametrize("prefix", WRAPPERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrapper_changes_the_names_alone(name, prefix):
    model = FAMILIES[name]()
    expected = {prefix + parameter: blocks for parameter, blocks in find_blocks(model).items()}
    assert find_blocks(WRAPPERS[prefix](model)) == expected


@compiles
@pytest.mark.parametrize(
    "name", ["gpt2", "gpt_neox", "falcon-groups", "bert", "phi3", "t5", "encoder_layer", "timm_vit"]
)
def test_compiling_the_attention_modules_alone_changes_the_names_alone(name):
    model = FAMILIES[name]()
    expected = find_blocks(model)
    for module in list(model.modules()):
        for attribute, child in list(module.named_children()):
            if "Attention" in type(child).__name__ and "T5Layer" not in type(child).__name__:
                setattr(module, attribute, torch.compile(child))
    found = find_blocks(model)
    assert any("_orig_mod" in parameter for parameter in found)
    assert {name.replace("_orig_mod.", ""): entry for name, entry in found.items()} == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_modules_whose_class_is_subclassed_as_fsdp2_does_are_recognised(name):
    model = FAMILIES[name]()
    expected = find_blocks(model)
    for module in model.modules():
        module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {})
    assert find_blocks(model) == expected


@pytest.mark.parametrize("name", ["lora-gpt2", "lora-llama"])
def test_the_base_beside_lora_factors_keeps_its_roles(name):
    model = FAMILIES[name]()
    unfrozen = find_blocks(model.requires_grad_(True))
    base = {
        n.removeprefix("base_model.model.").replace(".base_layer", ""): b
        for n, b in unfrozen.items()
        if "lora_" not in n
    }
    assert base == EXPECTED[name.removeprefix("lora-")]


def test_a_position_embedding_that_peft_saves_whole_keeps_its_role():
    import peft

    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], modules_to_save=["wpe"], fan_in_fan_out=True
    )
    blocks = find_blocks(peft.get_peft_model(CAUSAL["gpt2"](), config))
    saved = {n: b for n, b in blocks.items() if "modules_to_save" in n}
    assert [b.roles for b in saved.values()] == [("position",)]
