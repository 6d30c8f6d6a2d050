"""Comparisons of fine-tuning: a checkpoint that is trained once, all weights or LoRA's."""

from dataclasses import replace

import pytest
import torch

import blockopt
from recipes.common.gpt2 import GPT2, GPT2Config
from recipes.comparison import pretraining
from recipes.comparison.pretraining import Pretraining, checkpoint
from recipes.comparison.run_config import DataConfig
from recipes.comparison.runs import provenance, run_once
from recipes.comparison.starting_model import starting_model
from recipes.comparison.studies import Study

MODEL = GPT2Config(vocab_size=300, context=16, width=16, depth=1, heads=2)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A study of each kind, on another text than that of the checkpoint."""
    folder = tmp_path_factory.mktemp("fine_tuning")
    (folder / "first.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    (folder / "second.txt").write_text("the lazy dog jumps over the quick brown fox\n" * 300)
    made = {}
    for rank in (0, 2):
        study = Study(
            "tiny",
            ("shipped-adamw", "shipped-block-muon"),
            MODEL,
            DataConfig(str(folder / "second.txt"), None, MODEL.vocab_size),
            steps=4,
            lengths=(1.0,),
            batch_size=4,
            budget=1,
            seeds=1,
            length_seeds=1,
            baseline="shipped-adamw",
            evaluation=2,
            pretraining=Pretraining(str(folder / "first.txt"), lr=0.03, steps=40, rank=rank),
        )
        made[rank] = study.prepared(folder / "cache")
    return made


def config_of(study, arm="shipped-adamw", lr=1e-3):
    return study.config(arm, {"lr": lr}, seed=3, steps=4, purpose="test")


def test_the_checkpoint_is_trained_once_and_its_tokenizer_is_taken_over(prepared, monkeypatch):
    study = prepared[0]
    monkeypatch.setattr(pretraining, "train", lambda *_, **__: pytest.fail("trained again"))
    cache = study.data.cache
    again = checkpoint(study.pretraining, study.model, study.batch_size, cache)
    assert again == study.start
    first = DataConfig(study.pretraining.source, None, MODEL.vocab_size, cache=cache)
    assert study.data.tokenizer == str(pretraining.token_data(first).tokenizer)


def test_a_run_starts_at_the_checkpoint(prepared):
    study = prepared[0]
    model = starting_model(config_of(study))
    trained = torch.load(study.start.file, weights_only=True)
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    fresh = GPT2(study.model)
    assert not torch.equal(model.wte.weight, fresh.wte.weight)


def test_lora_trains_only_what_it_adds_and_that_has_roles(prepared):
    model = starting_model(config_of(prepared[2]))
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)
    roles = {role for blocks in blockopt.find_blocks(model).values() for role in blocks.roles}
    assert roles == {"query", "key", "value", "output", "mlp_in", "mlp_out"}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("arm", ["shipped-adamw", "shipped-muon", "shipped-block-muon"])
def test_fine_tuning_starts_below_a_fresh_model(arm, rank, prepared, tmp_path):
    tuned = run_once(config_of(prepared[rank], arm), tmp_path, provenance())
    fresh = replace(config_of(prepared[rank], arm), start=None)
    assert tuned.losses[0] < run_once(fresh, tmp_path, provenance()).losses[0] - 0.1
    assert tuned.header["config"]["start"]["rank"] == rank
    assert "file" not in tuned.header["config"]["start"]


def test_runs_with_and_without_a_checkpoint_have_other_names(prepared):
    all_weights, lora = config_of(prepared[0]), config_of(prepared[2])
    assert len({all_weights.key, lora.key, replace(lora, start=None).key}) == 3
    elsewhere = replace(all_weights, start=replace(all_weights.start, file="elsewhere.pt"))
    assert elsewhere.key == all_weights.key
