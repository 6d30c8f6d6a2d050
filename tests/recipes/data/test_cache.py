"""The token cache finds what it has, and survives damage, kills and full disks."""

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
from recipes.data.token_data import (
    default_cache,
    load_data,
)
from tests.helpers import ROOT

pytestmark = pytest.mark.usefixtures("own_folders")


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
