"""Data of the recipes: every document arrives, on its side, and is found again."""

import doctest
import gzip
import hashlib
import json
import sysconfig
from pathlib import Path

import pytest
import torch

import recipes.common.files
import recipes.data.sources
import recipes.data.token_data
import recipes.data.tokens
from recipes.data.token_data import Batches, load_data

END = "<|endoftext|>"


pytestmark = pytest.mark.usefixtures("own_folders")


def poems(number, offset=0):
    """Different short documents, with letters outside ASCII, line breaks and leading blanks."""
    return [
        f"  Poem {i}\nÜber {i * i} straßen — 猫 {i}\r\n\tthe end of the poem {'x' * (i % 7)}\n"
        for i in range(offset, offset + number)
    ]


def write_jsonl(path, texts, column="text"):
    path.write_text(
        "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts))
    )
    return str(path)


def documents(data, part):
    """Decoded documents of a part."""
    ids = getattr(data, part)
    if data.tokenizer is None:
        return [text.decode() for text in bytes(ids.tolist()).split(b"\0")][:-1]
    return data.decode(ids).split(END)[:-1]


def standard_library():
    """The modules, found in another way than in the recipe: {relative name: bytes}."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    names = [
        p.relative_to(root)
        for p in root.rglob("*.py")
        if not left_out & set(p.relative_to(root).parts)
    ]
    return {name.as_posix(): (root / name).read_bytes() for name in names}


@pytest.mark.parametrize(
    "module",
    [recipes.data.token_data, recipes.common.files, recipes.data.sources, recipes.data.tokens],
)
def test_examples_in_docstrings(module):
    tested = doctest.testmod(module)
    assert tested.attempted > 0
    assert tested.failed == 0


# --- sources


def test_every_module_of_the_standard_library_is_there_once_and_on_the_side_of_its_name(cache):
    data = load_data("stdlib", tokenizer="bytes", cache=cache)
    assert data.vocab_size == 256
    modules = {
        name: text.decode(errors="replace")
        for name, text in standard_library().items()
        if text.strip()
    }
    sides = {True: [], False: []}
    for name, text in modules.items():
        number = int(hashlib.sha256(name.encode()).hexdigest()[:16], 16)
        sides[number < 2**64 / 20].append(text)
    assert sorted(documents(data, "train")) == sorted(sides[False])
    assert sorted(documents(data, "validation")) == sorted(sides[True])


def test_subwords_decode_to_the_text(cache):
    data = load_data("stdlib", vocab_size=400, max_tokens=60_000, cache=cache)
    modules = {text.decode(errors="replace") for text in standard_library().values()}
    assert (len(data.train), data.vocab_size, data.train.dtype) == (60_000, 400, torch.uint16)
    assert 0 < len(data.validation) <= 60_000
    whole = documents(data, "train")
    assert len(whole) > 5
    assert set(whole) <= modules
    assert not set(whole) & set(documents(data, "validation"))


def test_the_same_documents_from_text_jsonl_parquet_and_compressed_files(cache, tmp_path):
    import datasets

    texts = poems(150)
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    for i, text in enumerate(texts):
        (tmp_path / "folder" / ("deep" if i % 2 else "") / f"{i}.txt").write_text(text, newline="")
    (tmp_path / "folder" / "picture.png").write_bytes(b"\0\1")
    (tmp_path / "joined.txt").write_text(END.join(texts), newline="")
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write(Path(write_jsonl(tmp_path / "rows.jsonl", texts)).read_text())
    datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "rows.parquet")
    for source in (
        "folder",
        "folder/**/*.txt",
        "joined.txt",
        "rows.jsonl",
        "rows.jsonl.gz",
        "rows.parquet",
    ):
        data = load_data(str(tmp_path / source), tokenizer="bytes", cache=cache)
        train, validation = documents(data, "train"), documents(data, "validation")
        assert sorted(train + validation) == sorted(texts), source
        assert 1 <= len(validation) <= 20, source
    rows = [
        load_data(str(tmp_path / f"rows.{kind}"), tokenizer="bytes", cache=cache)
        for kind in ("jsonl", "jsonl.gz", "parquet")
    ]
    assert all(torch.equal(row.train, rows[0].train) for row in rows)


def test_equal_rows_are_on_the_same_side(cache, tmp_path):
    data = load_data(
        write_jsonl(tmp_path / "a.jsonl", poems(100) * 3), tokenizer="bytes", cache=cache
    )
    train, validation = documents(data, "train"), documents(data, "validation")
    assert len(train) + len(validation) == 300
    assert not set(train) & set(validation)


def test_of_few_documents_the_ends_are_held_out(cache, tmp_path):
    lines = [f"line number {i}\n" for i in range(1000)]
    (tmp_path / "book.txt").write_text("".join(lines))
    data = load_data(
        str(tmp_path / "book.txt"), tokenizer="bytes", validation_fraction=0.1, cache=cache
    )
    (train,), (validation,) = documents(data, "train"), documents(data, "validation")
    assert train + validation == "".join(lines)
    assert 890 < train.count("\n") <= 900
    assert train.endswith("\n")


@pytest.mark.parametrize("number", [20, 25, 60])
def test_of_more_documents_one_at_least_is_held_out_and_none_is_cut(number, cache, tmp_path):
    for offset in range(0, 300, 100):
        source = write_jsonl(tmp_path / "a.jsonl", poems(number, offset))
        data = load_data(source, tokenizer="bytes", cache=cache)
        train, validation = documents(data, "train"), documents(data, "validation")
        assert sorted(train + validation) == sorted(poems(number, offset))
        assert 1 <= len(validation) < number / 3


def test_files_called_validation_are_held_out(cache, tmp_path):
    (tmp_path / "stories-valid.txt").write_text(END.join(poems(5, 1000)), newline="")
    (tmp_path / "stories-train.txt").write_text(END.join(poems(50)), newline="")
    data = load_data(str(tmp_path), tokenizer="bytes", cache=cache)
    assert documents(data, "train") == poems(50)
    assert documents(data, "validation") == poems(5, 1000)


def test_a_module_called_validation_is_a_module_like_others(cache, tmp_path):
    (tmp_path / "validation.py").write_text("def validate(): ...\n")
    for i in range(3):
        (tmp_path / f"module{i}.py").write_text(f"x = {i}\n" * 50)
    data = load_data(str(tmp_path), tokenizer="bytes", cache=cache)
    assert len(documents(data, "validation")) == 4  # the end of each


def test_the_subwords_are_those_of_the_training_part(cache, tmp_path):
    import tokenizers

    write_jsonl(tmp_path / "train.jsonl", poems(100))
    write_jsonl(tmp_path / "validation.jsonl", ["onlyhere onlyhere onlyhere"] * 500)
    data = load_data(str(tmp_path), vocab_size=300, cache=cache)
    other = tokenizers.ByteLevelBPETokenizer()
    other.train_from_iterator(
        poems(100), vocab_size=300, special_tokens=[END], show_progress=False, min_frequency=0
    )
    mine = tokenizers.Tokenizer.from_file(str(data.tokenizer))
    assert mine.get_vocab() == other.get_vocab()
    ids = [
        token for text in poems(100) for token in [*other.encode(text).ids, other.token_to_id(END)]
    ]
    assert data.train.tolist() == ids


def test_end_of_text_inside_a_row_is_text(cache, tmp_path):
    texts = [f"about {END} number {i}" for i in range(60)]
    data = load_data(write_jsonl(tmp_path / "a.jsonl", texts), vocab_size=300, cache=cache)
    ids = data.train.tolist() + data.validation.tolist()
    assert ids.count(0) == 60  # the special token is the first of the vocabulary
    assert data.decode(data.train).count(END) == 2 * data.train.tolist().count(0)


def test_long_documents_are_encoded_in_pieces_and_stay_whole(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(recipes.data.tokens, "PIECE", 100)
    texts = ["".join(f"{i} {k} wörd\n" for k in range(i * 7)) + "z" * 500 for i in range(1, 60)]
    data = load_data(write_jsonl(tmp_path / "a.jsonl", texts), vocab_size=300, cache=cache)
    assert sorted(documents(data, "train") + documents(data, "validation")) == sorted(texts)


def test_a_tokenizer_file_gives_the_tokens_of_the_trained_one(cache, tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", poems(100))
    trained = load_data(source, vocab_size=300, cache=cache)
    given = load_data(source, tokenizer=str(trained.tokenizer), cache=cache)
    assert given.vocab_size == 300
    assert given.key != trained.key
    assert torch.equal(given.train, trained.train)


def test_large_vocabularies_are_stored_wider(cache, tmp_path):
    import tokenizers

    words = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000, "[UNK]": 70_001}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    texts = [f"w{i} w{69_999 - i}" for i in range(60)]
    data = load_data(
        write_jsonl(tmp_path / "a.jsonl", texts),
        tokenizer=str(tmp_path / "words.json"),
        cache=cache,
    )
    assert (data.train.dtype, data.vocab_size) == (torch.int32, 70_002)
    expected = {(i, 69_999 - i, 70_000) for i in range(60)}
    assert {
        tuple(row) for row in torch.cat([data.train, data.validation]).view(-1, 3).tolist()
    } == expected


# --- addition


def test_sums_are_right_different_and_split(cache):
    data = load_data("addition:3", max_tokens=12 * 2000, cache=cache)
    assert (data.vocab_size, data.context, data.tokenizer) == (12, 11, None)
    assert data.train.shape == (2000, 12)
    train, validation = (
        {data.decode(row) for row in part} for part in (data.train, data.validation)
    )
    assert len(train) == 2000
    assert 60 < len(validation) < 150
    assert not train & validation
    for text in train | validation:
        question, answer = text.split("=")
        assert answer == f"{sum(map(int, question.split('+'))):04d}"


def test_all_sums_of_one_digit(cache):
    data = load_data("addition:1", cache=cache)
    texts = [data.decode(row) for row in torch.cat([data.train, data.validation])]
    assert sorted(texts) == sorted(f"{a}+{b}={a + b:02d}" for a in range(10) for b in range(10))


def test_only_answers_of_sums_are_targets(cache):
    data = load_data("addition:2", max_tokens=9 * 500, cache=cache)
    inputs, targets = data.batches("train", batch_size=500, context=8, seed=1)[0]
    assert (targets[:, :5] == -100).all()
    whole = torch.cat([inputs, targets[:, -1:]], dim=1)
    assert torch.equal(whole[:, 6:], targets[:, 5:])
    assert torch.equal(whole.sort(0).values, data.train.long().sort(0).values)
    answers = (targets[:, 5:] * torch.tensor([100, 10, 1])).sum(1)
    assert torch.equal(answers, 10 * (inputs[:, 0] + inputs[:, 3]) + inputs[:, 1] + inputs[:, 4])


# --- batches


def test_every_window_comes_once_an_epoch_in_another_order():
    tokens = torch.arange(10 * 23 + 4, dtype=torch.int32)
    batches = Batches(tokens, batch_size=4, context=10, seed=3)
    assert (batches.windows, batches.steps_per_epoch) == (23, 5)
    inputs, targets = map(torch.cat, zip(*(batches[step] for step in range(23))))  # four epochs
    assert inputs.dtype == targets.dtype == torch.long
    assert torch.equal(targets, inputs + 1)
    epochs = inputs.view(4, 23, 10)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == [list(range(10 * i, 10 * i + 10)) for i in range(23)]
    assert len({tuple(epoch[:, 0].tolist()) for epoch in epochs}) == 4


def test_a_batch_depends_on_its_number_alone():
    tokens = torch.randint(1000, (1001,), generator=torch.Generator().manual_seed(0)).to(
        torch.uint16
    )
    options = {"batch_size": 7, "context": 13}
    batches = Batches(tokens, seed=5, **options)
    in_order = [batches[step] for step in range(60)]
    for step in (59, 3, 31, 3, 0, 58):
        for again in (batches[step], Batches(tokens, seed=5, **options)[step]):
            assert all(map(torch.equal, again, in_order[step]))
    assert not torch.equal(Batches(tokens, seed=6, **options)[0][0], in_order[0][0])
    in_order[0][0].zero_()  # the caller's own
    assert batches[0][0].any()


def test_a_batch_larger_than_the_data_repeats_them():
    inputs, _ = Batches(torch.arange(7), batch_size=9, context=2, seed=0)[0]
    assert sorted(inputs[:, 0].tolist()) == [0, 0, 0, 2, 2, 2, 4, 4, 4]


@pytest.mark.parametrize(
    ("tokens", "context", "message"),
    [
        (torch.arange(8), 8, "Invalid context=8. Must be less than 8 tokens"),
        (torch.arange(0), 1, "less than 0 tokens"),
        (torch.zeros(5, 12), 64, "Invalid context=64. Must be 11"),
        (torch.arange(8), 0, "context=0. Must be an integer >= 1"),
    ],
)
def test_windows_that_do_not_fit(tokens, context, message):
    with pytest.raises(ValueError, match=message):
        Batches(tokens, batch_size=2, context=context, seed=0)


def test_negative_steps_are_refused():
    with pytest.raises(IndexError, match="step=-1"):
        Batches(torch.arange(9), batch_size=2, context=2, seed=0)[-1]
