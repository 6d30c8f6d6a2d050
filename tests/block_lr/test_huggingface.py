"""The callback for the Trainer of transformers, on a tiny GPT-2 and random tokens."""

import json
import random

import numpy
import pytest
import torch
import transformers
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments

import blockopt
from blockopt.block_lr.scales import block_scales
from blockopt.huggingface import BlockLRCallback, trainer_optimizer
from tests.helpers.block_lr import BUILD
from tests.helpers.models import SDPA

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*pin_memory"
)
STEPS = 6


class Tokens(Dataset):
    """Random sequences; `noisy` ones draw from Python, numpy and torch, as augmentation does."""

    def __init__(self, noisy=False):
        self.tokens = torch.randint(19, (40, 8), generator=torch.Generator().manual_seed(0))
        self.noisy = noisy

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        if self.noisy:
            shift = random.randrange(3) + int(numpy.random.randint(3)) + int(torch.randint(3, ()))
            tokens = (tokens + shift) % 19
        return {"input_ids": tokens, "labels": tokens}


class Stream(IterableDataset):
    def __iter__(self):
        yield from (Tokens()[index] for index in range(40))


def gpt2(dropout=0.1):
    sizes = {
        "vocab_size": 19,
        "n_positions": 8,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, **SDPA))


def trainer(path, callback=None, kind="block", dataset=None, **options):
    model = gpt2()
    defaults = {
        **{
            "output_dir": str(path),
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "use_cpu": True,
            "seed": 0,
        },
        **{
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_strategy": "no",
        },
    }
    return Trainer(
        model,
        TrainingArguments(**{**defaults, **options}),
        train_dataset=Tokens() if dataset is None else dataset,
        optimizers=(BUILD[kind](model), None),
        callbacks=[callback] if callback else None,
    )


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("curvature", ["gauss_newton", "newton", "gradient"])
@pytest.mark.filterwarnings(
    "ignore:No block had a positive curvature", "ignore:The refresh of the block"
)
def test_the_trainer_refreshes_by_optimizer_steps(curvature, kind, tmp_path):
    callback = BlockLRCallback(curvature=curvature, every=2, beta=0.0)
    run = trainer(tmp_path, callback, kind, gradient_accumulation_steps=2)
    run.train()
    block_lr = callback.block_lr
    assert block_lr.num_steps == STEPS
    assert len(block_lr.history) + block_lr.failures == 3
    scales = torch.cat(list(block_lr.last_scales.as_dict().values()))
    assert scales.max() > 1.1 > 0.9 > scales.min()
    plain = trainer(tmp_path, None, kind, gradient_accumulation_steps=2)
    plain.train()
    assert not torch.equal(weights(run), weights(plain))


@pytest.mark.parametrize("curvature", ["gauss_newton", "secant"])
def test_a_power_of_zero_is_a_run_without_it(curvature, tmp_path):
    """Neither the order of the data nor a random number of Python, numpy or torch changes."""
    results = []
    for callback in (BlockLRCallback(curvature=curvature, every=1, power=0.0), None):
        run = trainer(tmp_path, callback, dataset=Tokens(noisy=True))
        run.train()
        results.append((weights(run), torch.rand(1), random.random(), numpy.random.rand()))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*results))


def test_batches_are_drawn_anew_for_each_refresh_and_alike_in_each_run(tmp_path):
    def batches():
        seen = []

        def compute_loss(model, batch):
            seen.append(batch["input_ids"].clone())
            return model(**batch).loss

        callback = BlockLRCallback(curvature="secant", every=3, compute_loss=compute_loss)
        trainer(tmp_path, callback).train()
        assert [tuple(tokens.shape) for tokens in seen] == [(4, 8)] * 4
        return seen

    first, again = batches(), batches()
    assert torch.equal(first[0], first[1])  # both gradients of a secant
    assert not torch.equal(first[0], first[2])
    assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_a_batch_of_ones_own_is_measured_on(tmp_path):
    drawn, seen = [], []

    def batch():
        drawn.append(torch.randint(19, (2, 8), generator=torch.Generator().manual_seed(len(drawn))))
        return {"input_ids": drawn[-1], "labels": drawn[-1]}

    def compute_loss(model, batch):
        seen.append(batch["input_ids"])
        return model(**batch).loss

    trainer(
        tmp_path,
        BlockLRCallback(curvature="secant", batch=batch, compute_loss=compute_loss, every=4),
    ).train()
    assert len(drawn) == 2  # one for each refresh
    assert all(torch.equal(tokens, drawn[index // 2]) for index, tokens in enumerate(seen))
    assert len(seen) == 4


def test_a_training_set_without_a_length_needs_a_batch(tmp_path):
    with pytest.raises(
        ValueError, match=r"a Stream, has no length .* Pass BlockLRCallback\(batch=…\)"
    ):
        trainer(tmp_path, BlockLRCallback(), dataset=Stream()).train()
    batch = {"input_ids": Tokens().tokens[:2], "labels": Tokens().tokens[:2]}
    callback = BlockLRCallback(curvature="gauss_newton", batch=lambda: batch, every=3)
    trainer(tmp_path, callback, dataset=Stream()).train()
    assert [refresh.step for refresh in callback.block_lr.history] == [1, 4]


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("same_trainer", [False, True])
def test_a_resumed_training_goes_on_with_the_same_bits(kind, same_trainer, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3}
    callback = BlockLRCallback(every=2, bounds=(0.2, 5.0), by="tensor")
    run = trainer(tmp_path, callback, kind, **options)
    run.train()
    expected, history = weights(run), callback.block_lr.history
    assert (
        json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())["global_step"]
        == 3
    )
    again = callback if same_trainer else BlockLRCallback(every=2, bounds=(0.2, 5.0), by="tensor")
    resumed = run if same_trainer else trainer(tmp_path, again, kind, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(expected, weights(resumed))
    assert again.block_lr.history == history
    assert [refresh.step for refresh in again.block_lr.history] == [1, 3, 5]


def test_a_training_resumed_without_its_state_counts_on(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3}
    trainer(tmp_path, None, **options).train()
    callback = BlockLRCallback(every=2)
    trainer(tmp_path, callback, **options).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-3")
    )
    assert [refresh.step for refresh in callback.block_lr.history] == [4, 5]
    assert (tmp_path / "checkpoint-6").exists()


def test_a_second_training_starts_afresh(tmp_path):
    callback = BlockLRCallback(every=4)
    run = trainer(tmp_path, callback)
    run.train()
    first = callback.block_lr
    run.train()
    assert callback.block_lr is not first
    assert [refresh.step for refresh in callback.block_lr.history] == [1, 5]


def test_the_scales_are_those_of_the_curvature(tmp_path):
    values = {
        n: torch.arange(1.0, b.num_blocks + 1) for n, b in blockopt.find_blocks(gpt2()).items()
    }
    options = {"power": -1.0, "bounds": (0.5, 2.0), "by": "tensor"}
    callback = BlockLRCallback(curvature=lambda *_: values, beta=0.0, **options)
    run = trainer(tmp_path, callback, max_steps=1)
    run.train()
    expected = block_scales(values, run.model, **options)
    scales = run.optimizer.optimizer.block_scales()
    for name, scale in scales.items():
        torch.testing.assert_close(scale, expected[name])


@pytest.mark.parametrize("name", ["batch", "compute_loss"])
def test_what_is_no_function_is_refused(name):
    with pytest.raises(ValueError, match=f"Invalid {name}='loss'. Must be a function."):
        BlockLRCallback(**{name: "loss"})


def arguments(path, **options):
    defaults = {"learning_rate": 2e-3, "weight_decay": 0.05, "adam_beta2": 0.95, "max_steps": 3}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(
        str(path), **{**defaults, **quiet, "logging_strategy": "no", "seed": 0, **options}
    )


@pytest.mark.parametrize("kind", [blockopt.BlockAdamW, blockopt.BlockMuon])
def test_the_optimizer_of_the_arguments_serves_both_ways_of_passing_it(kind, tmp_path):
    results = []
    for way in ("instance", "class"):
        model, args, callback = gpt2(), arguments(tmp_path), BlockLRCallback(every=2)
        if way == "instance":
            given = {"optimizers": (trainer_optimizer(model, args, kind), None)}
        else:
            options = {"args": args, "optimizer_class": kind}
            given = {"optimizer_cls_and_kwargs": (lambda: trainer_optimizer, options)}
        run = Trainer(model, args, train_dataset=Tokens(), callbacks=[callback], **given)
        run.train()
        assert type(run.optimizer.optimizer) is kind
        results.append(weights(run))
        scales = callback.block_lr.last_scales.as_dict()
        assert len({float(scale[0]) for scale in scales.values()}) > 4
    assert torch.equal(*results)
    groups = trainer_optimizer(gpt2(), arguments(tmp_path), kind).param_groups
    assert {group["weight_decay"] for group in groups} == {0.05, 0.0}
    assert all(group["lr"] == 2e-3 and group["betas"] == (0.9, 0.95) for group in groups)


def test_the_trainers_own_optimizer_is_refused_with_the_line_to_write(tmp_path):
    run = Trainer(
        gpt2(), arguments(tmp_path), train_dataset=Tokens(), callbacks=[BlockLRCallback()]
    )
    message = (
        r"mixes the roles .*optimizers=\(blockopt.huggingface.trainer_optimizer\(model, args\)"
    )
    with pytest.raises(ValueError, match=message):
        run.train()
    with pytest.raises(ValueError, match=r"Must be BlockAdamW or BlockMuon"):
        trainer_optimizer(gpt2(), arguments(tmp_path), torch.optim.AdamW)
