"""Wrong requests for data are named, and flags ask for what the function would."""

import argparse
import json

import pytest

from recipes.common.errors import one_line_errors
from recipes.data.token_data import add_data_arguments, load_data, load_from_arguments

pytestmark = pytest.mark.usefixtures("own_folders")


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
    expected = load_data(
        str(corpus), vocab_size=300, cache=cache, max_tokens=2000, validation_fraction=0.2
    )
    assert (data.key, len(data.train)) == (expected.key, 2000)
    with pytest.raises(SystemExit, match="2"), one_line_errors():
        load_from_arguments(parser.parse_args(["--data", "missing.txt"]))
    assert capsys.readouterr().err.startswith("error: No file or folder 'missing.txt'")
