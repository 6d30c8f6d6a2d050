"""The token cache survives damage, kills and full disks; wrong requests are named."""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import recipes.data.token_data
from recipes.common.errors import one_line_errors
from recipes.data.token_data import (
    add_data_arguments,
    default_cache,
    load_data,
    load_from_arguments,
)
from tests.helpers import ROOT

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"line {i} of the corpus\n" for i in range(800)))
    return path


def load(corpus, cache, **options):
    return load_data(str(corpus), vocab_size=300, cache=cache, **options)


def folder_of(data, cache):
    return cache / "tokens" / data.key


def forbid_writing(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("tokenized again")

    monkeypatch.setattr(recipes.data.token_data, "write_tokens", fail)


# --- found again


def test_the_second_load_reads_the_same_tokens(corpus, cache, monkeypatch):
    first = load(corpus, cache)
    forbid_writing(monkeypatch)
    second = load(corpus, cache)
    assert (second.key, second.vocab_size, second.tokenizer) == (first.key, 300, first.tokenizer)
    assert torch.equal(second.train, first.train)
    assert torch.equal(second.validation, first.validation)


def test_the_same_text_elsewhere_is_the_same_data(corpus, cache, tmp_path, monkeypatch):
    first = load(corpus, cache)
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / corpus.name
    copy.write_bytes(corpus.read_bytes())
    forbid_writing(monkeypatch)
    assert load(copy, cache).key == first.key


def test_another_text_of_the_same_size_and_time_is_other_data(corpus, cache):
    first = load(corpus, cache)
    before = corpus.stat()
    text = corpus.read_text().replace("line 7 ", "like 7 ")
    corpus.write_text(text)
    os.utime(corpus, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (corpus.stat().st_size, corpus.stat().st_mtime_ns) == (
        before.st_size,
        before.st_mtime_ns,
    )
    second = load(corpus, cache)
    assert second.key != first.key
    assert second.decode(second.train).startswith(text[:1000])


@pytest.mark.parametrize(
    "options",
    [
        {"validation_fraction": 0.1},
        {"max_tokens": 500},
        {"tokenizer": "bytes"},
        {"text_column": "body"},
    ],
)
def test_other_settings_are_other_data(options, corpus, cache):
    assert load(corpus, cache, **options).key != load(corpus, cache).key


def test_two_builds_are_equal_to_the_bit(corpus, cache, tmp_path):
    one, two = (folder_of(load(corpus, place), place) for place in (cache, tmp_path / "other"))
    names = sorted(path.name for path in one.iterdir())
    assert names == ["meta.json", "tokenizer.json", "train.bin", "validation.bin"]
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def test_tokens_are_mapped_and_the_file_is_safe_from_writes(corpus, cache):
    data = load(corpus, cache)
    file = folder_of(data, cache) / "train.bin"
    before = file.read_bytes()
    assert len(before) == 2 * len(data.train)
    data.train[0] = 5
    assert file.read_bytes() == before
    assert str(file) in Path("/proc/self/maps").read_text() or not Path("/proc/self/maps").exists()


def test_the_default_folder_follows_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKOPT_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    data = load_data("addition:1")
    assert (tmp_path / "tokens" / data.key / "train.bin").stat().st_size == data.train.numel()
    monkeypatch.delenv("BLOCKOPT_CACHE")
    assert default_cache() == Path.home() / ".cache" / "blockopt"


# --- damage


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "tokenizer.json", "meta.json"])
def test_damage_is_seen_said_and_repaired(name, damage, corpus, cache, capsys):
    data = load(corpus, cache)
    expected, file = data.train.clone(), folder_of(data, cache) / name
    intact = file.read_bytes()
    damage(file)
    capsys.readouterr()
    again = load(corpus, cache)
    assert torch.equal(again.train, expected)
    assert file.read_bytes() == intact
    said = capsys.readouterr().err
    assert name in said
    assert "writing it again" in said
    load(corpus, cache)
    assert capsys.readouterr().err == ""


def test_a_full_disk_is_said_and_leaves_nothing_behind(corpus, cache):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (2000, limits[1])
    )  # the kernel refuses to write more to a file
    try:
        with pytest.raises(
            OSError, match=r"The disk is full .*Cannot write tokens to .*BLOCKOPT_CACHE"
        ):
            load(corpus, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [
        path.name for path in (cache / "tokens").iterdir() if not path.name.endswith(".lock")
    ] == []
    assert len(load(corpus, cache).train) > 1000


def test_a_folder_that_cannot_be_written_is_named(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Cannot write tokens to .*file/tokens.*--cache"):
        load(corpus, tmp_path / "file")


WORKER = """
import sys, time
from pathlib import Path
from recipes.data.sources import open_source
from recipes.data.tokens import cached, write_tokens
corpus, cache, name = sys.argv[1:]
options = {{"validation_fraction": 0.05, "text_column": "text", "streaming": False}}
source = open_source(corpus, cache=Path(cache), max_tokens=None, **options)
def build(folder):
    record = write_tokens(folder, source, "corpus", tokenizer=None, vocab_size=300, max_tokens=None)
    Path(name + ".writing").touch()
    time.sleep(60 if name.endswith("first") else 0.3)
    return record
Path(name + ".ready").touch()
while not name.endswith("first") and not Path(cache, "go").exists():
    time.sleep(0.01)
print(cached(Path(cache, "tokens", "key"), build))
"""


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_of_processes_at_once_one_writes_even_when_another_was_killed_writing(
    corpus, cache, tmp_path
):
    cache.mkdir()
    processes = {}
    for name in ("first", "second", "third"):
        command = [
            sys.executable,
            "-c",
            WORKER.format(root=str(ROOT)),
            str(corpus),
            str(cache),
            str(tmp_path / name),
        ]
        processes[name] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    try:
        until((tmp_path / "first.writing").exists)
        assert (cache / "tokens" / ".key.part" / "train.bin").exists()
        until(lambda: (tmp_path / "second.ready").exists() and (tmp_path / "third.ready").exists())
        (cache / "go").touch()
        time.sleep(0.3)
        assert processes["second"].poll() is None  # waits for the lock
        processes["first"].send_signal(signal.SIGKILL)
        results = [processes[name].communicate(timeout=60) for name in ("second", "third")]
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    assert [processes[name].returncode for name in processes] == [-signal.SIGKILL, 0, 0], results
    assert (tmp_path / "second.writing").exists() + (tmp_path / "third.writing").exists() == 1
    assert results[0][0] == results[1][0]
    assert "vocab_size': 300" in results[0][0]
    assert sorted(path.name for path in (cache / "tokens").iterdir()) == [".key.lock", "key"]
    expected = folder_of(load(corpus, tmp_path / "other"), tmp_path / "other")
    for name in ("train.bin", "validation.bin", "tokenizer.json", "meta.json"):
        assert (cache / "tokens" / "key" / name).read_bytes() == (expected / name).read_bytes()


# --- the hub


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


# --- wrong requests


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (
            "no/such/file.txt",
            {},
            FileNotFoundError,
            r"No file or folder 'no/such/file.txt' in .*Possible are: 'stdlib'",
        ),
        ("{tmp}/nothing/", {}, FileNotFoundError, "No file or folder"),
        ("{tmp}/*.parquet", {}, FileNotFoundError, "No file or folder"),
        (
            "{tmp}/empty",
            {},
            FileNotFoundError,
            r"No files in .*empty that end in one of .txt, .*.parquet",
        ),
        ("what is this?!", {}, FileNotFoundError, "Possible are"),
        ("what is this!", {}, ValueError, "Unknown data 'what is this!'. Possible are: 'stdlib'"),
        (
            "addition:many",
            {},
            ValueError,
            "Invalid data 'addition:many'. Must be addition:DIGITS with 1 to 17 digits",
        ),
        ("addition:18", {}, ValueError, "1 to 17 digits"),
        (
            "addition:1",
            {"validation_fraction": 1e-6},
            ValueError,
            "100 sums to train on and 0 held out.* raise max_tokens",
        ),
        (
            "{tmp}/rows.jsonl",
            {},
            ValueError,
            "No column 'text' in .*rows.jsonl. Those there are: 'id', 'body'",
        ),
        (
            "{tmp}/rows.jsonl",
            {"text_column": "id"},
            ValueError,
            "Column 'id' in .*rows.jsonl holds int, for example 0, not text",
        ),
        ("{tmp}/broken.jsonl", {}, ValueError, "Cannot read .*broken.jsonl"),
        (
            "{tmp}/blank.txt",
            {},
            ValueError,
            "Too little text in .*blank.txt': 0 tokens to train on, 0 held out",
        ),
        ("{tmp}/binary.txt", {}, ValueError, "binary.txt is no text file"),
        (
            "stdlib",
            {"vocab_size": 256},
            ValueError,
            "Invalid vocab_size=256. Must be >= 257 .*'bytes'",
        ),
        (
            "stdlib",
            {"validation_fraction": 0.0},
            ValueError,
            "validation_fraction=0.0. Must be more than 0",
        ),
        ("stdlib", {"max_tokens": 0}, ValueError, "max_tokens=0. Must be >= 1"),
        ("stdlib", {"tokenizer": "missing.json"}, FileNotFoundError, "No tokenizer 'missing.json'"),
        ("stdlib", {"tokenizer": "{tmp}/rows.jsonl"}, ValueError, "rows.jsonl is no tokenizer"),
        (
            "stdlib",
            {"tokenizer": "endless.json"},
            ValueError,
            "no token for the end of a text. Must have one of <|endoftext|>",
        ),
    ],
)
def test_wrong_requests(source, options, error, message, cache, tmp_path):
    import tokenizers

    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"id": i, "body": "text"}) + "\n" for i in range(9))
    )
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": "not fi')
    (tmp_path / "blank.txt").write_text(" \n" * 100)
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    if options.get("tokenizer") == "endless.json":
        tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(
            str(tmp_path / "endless.json")
        )
        options = {"tokenizer": "{tmp}/endless.json"}
    options = {
        name: value.format(tmp=tmp_path) if isinstance(value, str) else value
        for name, value in options.items()
    }
    with pytest.raises(error, match=message.replace("<|endoftext|>", ".*")):
        load_data(source.format(tmp=tmp_path), cache=cache, **options)


def test_flags(cache, corpus, capsys):
    parser = argparse.ArgumentParser()
    add_data_arguments(parser)
    assert parser.parse_args([]).data == "stdlib"
    flags = [
        "--data",
        str(corpus),
        "--vocab-size",
        "300",
        "--max-tokens",
        "2_000",
        "--cache",
        str(cache),
    ]
    data = load_from_arguments(parser.parse_args([*flags, "--validation-fraction", "0.2"]))
    expected = load(corpus, cache, max_tokens=2000, validation_fraction=0.2)
    assert (data.key, len(data.train)) == (expected.key, 2000)
    with pytest.raises(SystemExit, match="2"), one_line_errors():
        load_from_arguments(parser.parse_args(["--data", "missing.txt"]))
    assert capsys.readouterr().err.startswith("error: No file or folder 'missing.txt'")
