"""Models and texts in local files for `blockopt hessian`, and ways to run it."""

import json

import pytest
import torch
import transformers

from blockopt.cli import main
from tests.helpers.small_language_models import GPT2, LLAMA

TEXT = (
    "The Hessian of a transformer differs by block: values are steep, queries and keys are flat.\n"
    * 8
)


QUICK = ("--length", "8", "--sequences", "3", "--probes", "2", "--starts", "0")


def config_folder(folder, kind="gpt2", **entries):
    folder.mkdir(exist_ok=True)
    defaults = {"gpt2": GPT2, "llama": LLAMA}.get(kind, {})
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **defaults, **entries}))
    return str(folder)


def checkpoint(folder, seed=5, **entries):
    """A saved model with weights of its own, and the model."""
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**{**GPT2, "bos_token_id": 0, "eos_token_id": 0, **entries})
    )
    model.save_pretrained(folder)
    return str(folder), model


def save_tokenizer(
    folder, words=("the", "hessian", "of", "a", "transformer", "differs", "by", "block")
):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({"[UNK]": 0, **{w: i + 1 for i, w in enumerate(words)}}, unk_token="[UNK]")
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.Lowercase(),
        pre_tokenizers.Whitespace(),
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]"
    ).save_pretrained(folder)


def run_files(tmp_path, *arguments):
    out = tmp_path / "out"
    assert main(["hessian", *arguments, "--out", str(out)]) == 0
    return json.loads((out / "report.json").read_text()), out


def message_of(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(["hessian", *arguments])
    return str(caught.value)
