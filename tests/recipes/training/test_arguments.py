"""The flags of the training script: bad and useless ones are refused at once."""

import pytest

from recipes import train_hf
from recipes.training.arguments import parse


@pytest.fixture(autouse=True)
def not_launched(monkeypatch):
    for name in ("MIXED_PRECISION", "DYNAMO_BACKEND", "GRADIENT_ACCUMULATION_STEPS"):
        monkeypatch.delenv(f"ACCELERATE_{name}", raising=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--optimizer", "adam"), "Invalid optimizer 'adam'. Must be one of block-adamw"),
        (("--optimizer", "torch_optimizer:Yogurt"), "torch-optimizer has"),
        (("--steps", "0"), "Invalid --steps=0"),
        (("--lr", "-1"), "Invalid --lr=-1"),
        (("--lr", "nan"), "Invalid --lr=nan"),
        (("--warmup", "1000"), "Invalid warmup=1000 of 1000"),
        (("--batch-size", "10", "--accumulate", "4"), "multiple of 4"),
        (("--betas", "0.9", "1.0"), "Invalid --betas"),
        (("--schedule", "wsd", "--decay", "0"), "Invalid decay=0"),
        (
            ("--optimizer", "schedulefree", "--schedule", "cosine"),
            "Must be constant for schedulefree",
        ),
        (("--width", "33", "--heads", "2"), "Invalid width=33"),
        (("--hf-config", "x", "--width", "32"), "--width is an option of our GPT-2"),
        (("--hf-config", "x", "--hf-checkpoint", "y"), "not allowed with"),
        (("--context", "0"), "Invalid --context=0"),
        (("--curvature", "guess"), "invalid choice"),
        (("--keep", "0"), "Invalid --keep=0"),
        (("--clip", "-1"), "Invalid --clip=-1"),
        (("--clip", "inf"), "Invalid --clip=inf. Must be >= 0 and finite."),
        (("--track", "guess"), "invalid choice"),
        (("--compile", "garbage"), "Invalid --compile=garbage. Must be one of no, eager"),
        (("--seed", "-1"), "Invalid --seed=-1"),
        (("--seed", str(1 << 32)), "Invalid --seed"),
        (("--curvature", "newton", "--curvature-power", "nan"), "Invalid --curvature-power=nan"),
        (("--vocab-size", "10"), "Invalid --vocab-size=10. Must be >= 257"),
        (("--max-tokens", "0"), "Invalid --max-tokens=0"),
        (("--validation-fraction", "0.6"), "Invalid --validation-fraction=0.6"),
        (("--optimizer", "adamw", "--momentum", "0.9"), "--momentum is for --optimizer sgd"),
        (("--optimizer", "sgd", "--betas", "0.9", "0.9"), "--betas is for optimizers with"),
        (("--decay", "0.2"), "--decay is for --schedule wsd"),  # also if it is the default
        (("--schedule", "constant", "--final", "0.1"), "--final is for a --schedule that decays"),
        (("--curvature-every", "10"), "--curvature-every is for --curvature"),
        (("--curvature-by", "head"), "--curvature-by is for --curvature"),
        (("--hf-config", "x", "--model", "1M"), "--model is for our GPT-2"),
        (
            ("--tokenizer", "bytes", "--vocab-size", "300"),
            "--vocab-size is for a tokenizer that is trained",
        ),
        (("--data", "addition:2", "--tokenizer", "bytes"), "--tokenizer is for text"),
        (("--override", "wte.weight=table"), "with the role 'table'"),
        (("--override", "wpe.weight=position", "--override", "wte"), "Invalid override 'wte'"),
        (
            ("--optimizer", "adam-mini", "--override", "wte.weight=other"),
            "adam-mini finds blocks of its own. Leave out --override",
        ),
        (
            ("--record-hessian", "0", "--override", "wte.weight=other"),
            "left out with --override, which it would not follow",
        ),
    ],
)
def test_bad_flags_are_refused_early(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(list(options))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setattr("recipes.training.arguments.get_available_trackers", lambda: [])
    with pytest.raises(SystemExit):
        parse(["--track", "tensorboard"])
    assert "pip install tensorboard" in capsys.readouterr().err


def test_one_rank_says_what_is_wrong(capsys, monkeypatch):
    waited = []
    monkeypatch.setattr("recipes.training.arguments.time.sleep", waited.append)
    for rank, said in (("1", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        for flags in (["--steps", "0"], ["--steps", "many"]):
            with pytest.raises(SystemExit) as caught:
                parse(flags)
            assert caught.value.code == 2
            assert bool(capsys.readouterr().err) == said
    assert waited == [3, 3]


@pytest.mark.parametrize(
    ("optimizer", "lr"),
    [("block-muon", 1e-2), ("sgd", 0.3), ("block-sgd", 0.15), ("block-adamw-block", 3e-3)],
)
def test_the_learning_rate_is_that_of_the_optimizer(optimizer, lr):
    assert parse(["--optimizer", optimizer]).lr == lr
    assert train_hf.parse(["--optimizer", optimizer]).lr == lr
    assert parse(["--optimizer", optimizer, "--lr", "0.5"]).lr == 0.5


def test_flags_that_do_something_are_taken():
    parse(
        [
            "--optimizer",
            "block-muon",
            "--momentum",
            "0.9",
            "--betas",
            "0.9",
            "0.99",
            "--schedule",
            "wsd",
            "--decay",
            "0.1",
        ]
    )
    parse(
        [
            "--curvature",
            "newton",
            "--curvature-every",
            "10",
            "--curvature-by",
            "head",
            "--vocab-size",
            "300",
        ]
    )
    parse(
        [
            "--optimizer",
            "torch_optimizer:SGDW",
            "--momentum",
            "0.8",
            "--data",
            "addition",
            "--model",
            "1M",
        ]
    )


def test_what_accelerate_is_configured_for(monkeypatch, capsys):
    """Its variables hold where no flag is given, and may not change what the flags say."""
    assert (parse([]).precision, parse([]).compile) == ("no", None)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    assert (parse([]).precision, parse([]).compile) == ("bf16", "aot_eager")
    assert (parse(["--precision", "no"]).precision, parse(["--compile"]).compile) == (
        "no",
        "inductor",
    )
    assert parse(["--compile", "no"]).compile is None
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(SystemExit):
        parse([])
    assert "configured for precision 'fp16'. Must be one of no, bf16" in capsys.readouterr().err
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert parse(["--accumulate", "4"]).accumulate == 4
    with pytest.raises(SystemExit):
        parse([])
    assert "Invalid --accumulate=1. Must be 4" in capsys.readouterr().err


def test_a_preset_brings_its_vocabulary():
    assert parse([]).vocab_size == 1024
    assert parse(["--model", "small"]).vocab_size == 50257
    assert parse(["--model", "small", "--vocab-size", "4096"]).vocab_size == 4096
