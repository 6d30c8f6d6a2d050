"""A refresh leaves no trace, a resumed run has the same bits, the history tells what happened."""

import io

import pytest
import torch
import transformers
from torch import nn

import blockopt
from blockopt.block_lr import BlockLR
from blockopt.curvature import ESTIMATORS
from tests.helpers.models import CNN, SDPA
from tests.helpers.optimizers import tiny_gpt, token_loss

pytestmark = pytest.mark.filterwarnings(
    "ignore:No block had a positive curvature",
    "ignore:The refresh of the block learning rates",
    "ignore:.*is neither cross-entropy",
)


def gpt_with_dropout():
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 19,
        "n_positions": 8,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    dropout = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, **SDPA)).train()


def cnn_with_batch_norm():
    torch.manual_seed(0)
    return CNN().train()


def batch_loss(model, seed):
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, CNN):
        images, classes = (
            torch.randn(3, 3, 8, 8, generator=generator),
            torch.randint(5, (3,), generator=generator),
        )
        return nn.functional.cross_entropy(model(images), classes)
    tokens = torch.randint(19, (3, 8), generator=generator)
    return model(tokens, labels=tokens, use_cache=False).loss


BUILD = {
    "block": lambda model: blockopt.BlockAdamW(blockopt.param_groups(model), lr=1e-2),
    "block-sgd": lambda model: blockopt.BlockSGD(
        blockopt.param_groups(model), lr=1e-2, momentum=0.9
    ),
    "torch": lambda model: torch.optim.AdamW(blockopt.param_groups(model, by="parameter"), lr=1e-2),
}
FUNCTION = "a function"
AT_ONCE = [name for name, estimator in ESTIMATORS.items() if not estimator.needs_slopes]


def own_function(model, loss):
    """A curvature function that disturbs whatever it can."""
    model.train()
    loss().backward()
    torch.rand(3)
    return {
        n: torch.full((b.num_blocks,), 1.0 + len(n)) for n, b in blockopt.find_blocks(model).items()
    }


def run(build_model, build_optimizer, options, steps=range(4), resume=None, late=False):
    model = build_model()
    optimizer = build_optimizer(model)
    block_lr = None if options is None or late else BlockLR(optimizer, model, **options)
    if resume is not None:
        model.load_state_dict(resume["model"])
        optimizer.load_state_dict(resume["optimizer"])
        torch.set_rng_state(resume["rng"])
        if late:
            block_lr = BlockLR(optimizer, model, **options)
    else:
        torch.manual_seed(1)
    for step in steps:
        optimizer.zero_grad()
        batch_loss(model, step).backward()
        optimizer.step()
        if block_lr is not None:
            gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            block_lr.step(lambda step=step: batch_loss(model, 100 + step))
            assert all(
                g is None or torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients)
            )
            assert all(module.training for module in model.modules())
    return model, optimizer, block_lr


@pytest.mark.parametrize("optimizer_name", ["block", "torch"])
@pytest.mark.parametrize(
    ("build_model", "curvature"),
    [
        *((gpt_with_dropout, curvature) for curvature in (*AT_ONCE, FUNCTION)),
        *(
            (cnn_with_batch_norm, curvature)
            for curvature in (*AT_ONCE, FUNCTION)
            if curvature != "power_law"
        ),  # for transformers
    ],
)
def test_a_power_of_zero_is_a_run_without_it(build_model, curvature, optimizer_name):
    options = {
        "curvature": own_function if curvature == FUNCTION else curvature,
        "every": 1,
        "power": 0.0,
    }
    model, optimizer, block_lr = run(build_model, BUILD[optimizer_name], options)
    plain, reference, _ = run(build_model, BUILD[optimizer_name], None)
    assert len(block_lr.history) + block_lr.failures == 4
    assert block_lr.history
    assert all((scale == 1).all() for scale in block_lr.last_scales.as_dict().values())
    for (name, value), expected in zip(
        model.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(value, expected), name
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        state, expected = optimizer.state[p], reference.state[q]
        assert all(
            torch.equal(state[key], expected[key])
            for key in expected
            if isinstance(expected[key], torch.Tensor)
        )


def test_other_powers_change_the_run():
    options = {"curvature": "gauss_newton", "every": 1}
    model, _, _ = run(gpt_with_dropout, BUILD["torch"], options)
    plain, _, _ = run(gpt_with_dropout, BUILD["torch"], None)
    assert not torch.equal(next(model.parameters()), next(plain.parameters()))


@pytest.mark.parametrize("optimizer_name", BUILD)
@pytest.mark.parametrize("curvature", ["gauss_newton", "hutchinson", "directional", "gradient"])
@pytest.mark.parametrize(("split", "late"), [(2, False), (3, True)])
def test_a_resumed_optimizer_goes_on_with_the_same_bits(curvature, optimizer_name, split, late):
    """Its checkpoint is enough, whether it is loaded before or after BlockLR is made."""
    options = {"curvature": curvature, "every": 2, "beta": 0.7, "by": "tensor"}
    expected, _, uninterrupted = run(gpt_with_dropout, BUILD[optimizer_name], options, range(6))
    model, optimizer, _ = run(gpt_with_dropout, BUILD[optimizer_name], options, range(split))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = io.BytesIO()
    torch.save({**saved, "rng": torch.get_rng_state()}, file)
    file.seek(0)
    resume = torch.load(file, weights_only=True)
    resumed, _, again = run(
        gpt_with_dropout, BUILD[optimizer_name], options, range(split, 6), resume, late
    )
    for p, q in zip(resumed.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)
    assert again.history == uninterrupted.history
    assert again.num_steps == uninterrupted.num_steps == 6
    assert again.state_dict().keys() == uninterrupted.state_dict().keys()
    for name, logs in again.state_dict()["log_scales"].items():
        assert torch.equal(logs, uninterrupted.state_dict()["log_scales"][name])


@pytest.mark.parametrize("optimizer_name", ["block", "torch"])
def test_a_saved_state_carries_the_scales_by_itself(optimizer_name):
    _, _, block_lr = run(gpt_with_dropout, BUILD[optimizer_name], {"every": 1})
    model = gpt_with_dropout()
    optimizer = BUILD[optimizer_name](model)
    fresh = BlockLR(optimizer, model)
    fresh.load_state_dict(block_lr.state_dict())
    expected = block_lr.last_scales.as_dict()
    assert all(
        torch.equal(scale, expected[name]) for name, scale in fresh.last_scales.as_dict().items()
    )
    if optimizer_name == "block":
        assert all(
            torch.equal(scale, expected[name]) for name, scale in optimizer.block_scales().items()
        )
    else:
        assert fresh._hooks._multipliers == block_lr._hooks._multipliers
        assert fresh._hooks._multipliers != [1.0] * len(optimizer.param_groups)


def test_failures_are_saved():
    model = tiny_gpt()
    optimizer = BUILD["block"](model)
    block_lr = BlockLR(optimizer, model, every=1)
    token_loss(model).backward()
    optimizer.step()
    block_lr.step(lambda: None)
    fresh = BlockLR(optimizer, model, every=1)
    fresh.load_state_dict(block_lr.state_dict())
    assert fresh.failures == 1
    assert fresh.state_dict() == block_lr.state_dict()


@pytest.mark.parametrize("optimizer_name", BUILD)
def test_the_state_in_the_optimizer_is_plain_and_that_of_the_last_checkpoint(optimizer_name):
    _, optimizer, block_lr = run(gpt_with_dropout, BUILD[optimizer_name], {"every": 1})
    assert optimizer.param_groups[0]["block_lr"] == ""  # nothing that a compiled step could see
    saved = optimizer.state_dict()
    assert isinstance(saved["param_groups"][0]["block_lr"], str)
    model = gpt_with_dropout()
    other = BUILD[optimizer_name](model)
    first = BlockLR(other, model)
    other.load_state_dict(saved)
    second = BlockLR(other, model)  # made once more before training goes on, as in a notebook
    assert second.history == first.history == block_lr.history
    batch_loss(model, 0).backward()
    other.step()
    assert second.num_steps == block_lr.num_steps + 1
    third = BlockLR(other, model)
    assert third.num_steps == len(third.history) == 0


def test_a_checkpoint_without_the_state_leaves_it_alone():
    model = gpt_with_dropout()
    plain = BUILD["block"](model)
    _, optimizer, block_lr = run(gpt_with_dropout, BUILD["block"], {"every": 1})
    optimizer.load_state_dict(plain.state_dict())
    assert len(block_lr.history) == block_lr.num_steps == 4


def test_a_run_without_it_passes_the_state_on():
    _, optimizer, block_lr = run(gpt_with_dropout, BUILD["block"], {"every": 1})
    model = gpt_with_dropout()
    between = BUILD["block"](model)
    between.load_state_dict(optimizer.state_dict())
    last = BUILD["block"](model)
    last.load_state_dict(between.state_dict())
    assert BlockLR(last, model).history == block_lr.history


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_state_serves_a_model_under_another_wrapper():
    _, _, block_lr = run(gpt_with_dropout, BUILD["block"], {"every": 1})
    model = gpt_with_dropout()
    wrapped = BlockLR(BUILD["block"](model), torch.compile(model))
    wrapped.load_state_dict(block_lr.state_dict())
    expected = block_lr.last_scales.as_dict()
    scales = wrapped.last_scales.as_dict()
    assert all(torch.equal(scales[f"_orig_mod.{name}"], scale) for name, scale in expected.items())
    assert wrapped.state_dict()["log_scales"].keys() == block_lr.state_dict()["log_scales"].keys()


def test_a_state_of_other_blocks_is_refused():
    _, _, block_lr = run(gpt_with_dropout, BUILD["block"], {"every": 1})
    model = gpt_with_dropout()
    blocks = blockopt.find_blocks(model, per_row=())
    other = BlockLR(blockopt.BlockAdamW(blockopt.param_groups(model, blocks), lr=1e-2), model)
    with pytest.raises(
        ValueError, match=r"has 19 scales for 'transformer.wte.weight'. Must be 1, one per block."
    ):
        other.load_state_dict(block_lr.state_dict())
    unrelated = tiny_gpt()
    with pytest.raises(
        ValueError, match=r"'transformer.wte.weight', which is no parameter of the model"
    ):
        BlockLR(BUILD["block"](unrelated), unrelated).load_state_dict(block_lr.state_dict())
