"""Files that people have: tests, dev parts, empty, broken, other encodings; each is named."""

import argparse
import gzip
import hashlib
import json

import pytest

import recipes.common.files
import recipes.data.tokens
from recipes.data.token_data import default_cache, load_data

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    return folder


def write_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def documents(data, part):
    return sorted(text.decode() for text in bytes(getattr(data, part).tolist()).split(b"\0")[:-1])


def load(source, **options):
    return load_data(str(source), tokenizer="bytes", **options)


@pytest.mark.parametrize("size", [0, 7, 3_000_000])
def test_the_checksum_of_a_file(size, tmp_path):
    text = (b"block" * size)[:size]
    (tmp_path / "file").write_bytes(text)
    assert recipes.common.files.sha256(tmp_path / "file") == hashlib.sha256(text).hexdigest()


# --- names


def test_files_called_test_are_left_out_and_dev_is_held_out(folder, capsys):
    for name in ("train", "dev", "test", "test1", "part_test-2", "latest", "device"):
        write_rows(folder / f"{name}.jsonl", [f"row {i} of {name}" for i in range(3)])
    data = load(folder)
    assert documents(data, "validation") == [f"row {i} of dev" for i in range(3)]
    assert {text.split()[-1] for text in documents(data, "train")} == {"train", "latest", "device"}
    said = capsys.readouterr().err
    assert (
        "held out by name: dev.jsonl; left out by name: part_test-2.jsonl, test.jsonl, test1.jsonl"
        in said
    )


def test_a_test_file_that_is_asked_for_is_read(folder, capsys):
    write_rows(folder / "test.jsonl", [f"row {i}" for i in range(50)])
    for source in (folder, folder / "test.jsonl", folder / "test*.jsonl"):
        data = load(source)
        assert len(documents(data, "train") + documents(data, "validation")) == 50
    assert "left out" not in capsys.readouterr().err


def key_of_names_and_texts(folder):
    """The key of a folder, all of whose files have the same role."""
    names = sorted(
        (path.name for path in folder.iterdir()),
        key=lambda name: hashlib.sha256(name.encode()).digest(),
    )
    pairs = [
        json.dumps([name, hashlib.sha256((folder / name).read_bytes()).hexdigest()])
        for name in names
    ]
    settings = {
        "format": 1,
        "validation_fraction": 0.05,
        "max_tokens": None,
        "text_column": "text",
        "tokenizer": "bytes",
    }
    settings["content"] = hashlib.sha256("".join(pairs).encode()).hexdigest()
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def test_what_is_held_out_by_name_is_part_of_the_key(folder):
    """So that tokens of a version that split them differently are not taken."""
    for name in ("dev", "train"):
        write_rows(folder / f"{name}.jsonl", [f"row {i} of {name}" for i in range(3)])
    assert load(folder).key != key_of_names_and_texts(folder)
    (folder / "dev.jsonl").rename(folder / "device.jsonl")
    assert load(folder).key == key_of_names_and_texts(folder)


# --- contents


def test_text_that_is_no_utf8_is_refused_with_its_place(folder):
    (folder / "good.txt").write_text("straße\n" * 20, encoding="utf-8")
    (folder / "old.txt").write_bytes(b"x" * 1234 + "Straße".encode("latin-1"))
    with pytest.raises(
        ValueError, match=r"old.txt is no UTF-8 text: byte 0xdf at 1,238. Convert it"
    ):
        load(folder)
    (folder / "old.txt").unlink()
    (folder / "rows.jsonl").write_bytes('{"text": "Straße"}\n'.encode("latin-1"))
    with pytest.raises(
        ValueError, match=r"Cannot read .*rows.jsonl: 'utf-8' codec can't decode byte 0xdf"
    ):
        load(folder)


def test_empty_rows_files_are_no_rows(folder):
    (folder / "a.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"Too little text in .*0 tokens to train on, 0 held out"):
        load(folder)
    gzip.open(folder / "b.jsonl.gz", "wb").close()
    write_rows(folder / "c.jsonl", [f"row {i}" for i in range(30)])
    (folder / "d.jsonl").write_text("\n\n")
    data = load(folder)
    assert sorted(documents(data, "train") + documents(data, "validation")) == sorted(
        f"row {i}" for i in range(30)
    )


@pytest.mark.parametrize("text", [b"", b"PAR1 and then something else"])
def test_a_broken_parquet_file_is_named_among_others(text, folder):
    import datasets

    for name in "abcde":
        datasets.Dataset.from_dict({"text": [f"{name} {i}" for i in range(9)]}).to_parquet(
            folder / f"{name}.parquet"
        )
    (folder / "d.parquet").write_bytes(text)
    with pytest.raises(ValueError, match=r"Cannot read [^ ]*d.parquet: Parquet"):
        load(folder)


def test_with_few_tokens_asked_for_something_is_still_held_out(folder, monkeypatch):
    """Though the training part is full long before the first such row, the last of all."""
    monkeypatch.setattr(recipes.data.tokens, "PIECE", 100)
    rows = sorted(
        (f"{i} " * 80 for i in range(25)),
        key=lambda row: hashlib.sha256(row.encode()).digest(),
        reverse=True,
    )
    write_rows(folder / "rows.jsonl", rows)
    data = load(folder, max_tokens=60)
    assert len(data.train) == len(data.validation) == 60
    assert bytes(data.validation.tolist()).decode() == rows[-1][:60]


def test_a_part_that_is_too_short_is_named(folder):
    (folder / "notes.txt").write_text("a line of text\n" * 30)
    data = load(folder)
    tokens = len(data.validation)
    message = f"The validation part of .* has {tokens} tokens, and one window takes 65. "
    message += "Lower --context or raise --validation-"
    with pytest.raises(ValueError, match=message):
        data.batches("validation", batch_size=2, context=64, seed=0)
    with pytest.raises(ValueError, match=r"The train part of .* takes 641. Lower --context\.$"):
        data.batches("train", batch_size=2, context=640, seed=0)
    assert data.batches("validation", batch_size=2, context=tokens - 1, seed=0).windows == 1


def test_a_data_set_that_is_a_script_is_said(monkeypatch):
    import datasets
    import huggingface_hub

    def load_dataset(name, config, *, revision, streaming):
        raise RuntimeError("Dataset scripts are no longer supported, but found openwebtext.py")

    info = argparse.Namespace(sha="a" * 40)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda self, name, timeout=None: info
    )
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        ValueError,
        match=r"Cannot load 'openwebtext'.* found openwebtext.py. Choose .*HuggingFaceFW/fineweb",
    ):
        load("openwebtext")
    assert not list((default_cache() / "tokens").glob("[!.]*"))
