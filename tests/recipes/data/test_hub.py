"""Data of the Hugging Face hub, which is faked here: parts, revisions, streams, no network."""

import argparse
import os
import subprocess
import sys

import pytest
import torch

import recipes.data.tokens
from recipes.data.token_data import load_data
from tests.helpers import ROOT

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture
def hub(monkeypatch):
    """A hub with one data set, `someone/stories`; `hub["online"] = False` cuts the network."""
    import datasets
    import huggingface_hub

    hub = {"online": True, "revision": "a" * 40, "read": 0, "validation": True}

    def dataset_info(self, name, timeout=None):
        if not hub["online"]:
            raise OSError("Name or service not known")
        return argparse.Namespace(sha=hub["revision"])

    def rows(start, stop):
        for i in range(start, stop):
            hub["read"] += 1
            yield {"story": f"story {i} of {hub['revision'][0]}"}

    def load_dataset(name, config, *, revision, streaming):
        assert (name, config, revision) == ("someone/stories", "short", hub["revision"])
        assert hub["online"]  # it would try for half a minute
        sizes = {"train": (0, 10_000)} | (
            {"validation": (10_000, 10_010)} if hub["validation"] else {}
        )
        if streaming:
            parts = {
                part: datasets.IterableDataset.from_generator(
                    rows, gen_kwargs={"start": a, "stop": b}
                )
                for part, (a, b) in sizes.items()
            }
            return datasets.IterableDatasetDict(parts)
        return datasets.DatasetDict(
            {part: datasets.Dataset.from_list(list(rows(a, b))) for part, (a, b) in sizes.items()}
        )

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return hub


def load_stories(cache, **options):
    return load_data(
        "someone/stories:short", tokenizer="bytes", text_column="story", cache=cache, **options
    )


def test_hub_data_keep_their_validation_part_and_work_offline_afterwards(hub, cache):
    data = load_stories(cache)
    texts = bytes(data.validation.tolist()).decode().split("\0")
    assert texts == [*(f"story {i} of a" for i in range(10_000, 10_010)), ""]
    assert bytes(data.train.tolist()).count(b"\0") == 10_000
    hub["online"] = False
    again = load_stories(cache)
    assert again.key == data.key
    assert torch.equal(again.train, data.train)
    with pytest.raises(
        ConnectionError,
        match=r"Cannot reach the Hugging Face hub .*Prepare it once.*Possible are: 'stdlib'",
    ):
        load_stories(cache, max_tokens=100)  # not prepared


def test_a_new_revision_is_other_data(hub, cache):
    old = load_stories(cache, max_tokens=1000)
    hub["revision"] = "b" * 40
    new = load_stories(cache, max_tokens=1000)
    assert new.key != old.key
    assert bytes(new.train.tolist()).startswith(b"story 0 of b\0")


def test_a_stream_is_read_no_further_than_needed(hub, cache, monkeypatch):
    monkeypatch.setattr(recipes.data.tokens, "PIECE", 1000)
    hub["validation"] = False
    data = load_stories(cache, streaming=True, max_tokens=5000)
    assert len(data.train) == 5000
    assert 0 < len(data.validation) < 1000
    assert hub["read"] < 1000  # of 10,000
    with pytest.raises(ValueError, match="streaming=True without max_tokens"):
        load_stories(cache, streaming=True)


def test_a_wrong_column_of_the_hub_is_said(hub, cache):
    with pytest.raises(
        ValueError, match=r"No column 'text' in someone/stories:short. Those there are: 'story'"
    ):
        load_data("someone/stories:short", cache=cache)


def test_offline_the_script_says_what_to_do_in_a_few_lines(cache, tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    command = [
        sys.executable,
        ROOT / "recipes" / "prepare_data.py",
        "--cache",
        cache,
        "--data",
        "wikitext:wikitext-2-raw-v1",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: Cannot reach the Hugging Face hub for 'wikitext'")
    assert done.stderr.count("\n") == 1
