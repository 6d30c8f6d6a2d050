"""What BlockLR refuses, and what it survives."""

import gc
import math
import warnings
import weakref

import pytest
import torch

import blockopt
from blockopt.block_lr import BlockLR
from blockopt.curvature import ESTIMATORS, gradient
from tests.block_lr.test_block_lr import attached, constant, take_step
from tests.helpers.optimizers import OPTIMIZERS, tiny_gpt, token_loss

BROKEN = {
    "loss that is not finite": (
        lambda model: token_loss(model) * math.nan,
        "NonFiniteError.*nan",
    ),
    "no loss": (lambda model: None, "NoLossError.*returned None"),
    "no memory on a GPU": (
        lambda model: _raise(torch.OutOfMemoryError("CUDA out of memory.")),
        "out of memory",
    ),
    "no memory elsewhere": (
        lambda model: _raise(RuntimeError("MPS backend out of memory")),
        "out of memory",
    ),
    "no memory on a CPU": (lambda model: torch.empty(2**60), "can't allocate memory"),
}


def _raise(error):
    raise error


def test_a_loss_in_place_of_a_closure_is_refused_also_where_no_refresh_is_due():
    model, optimizer, block_lr = attached("newton", every=10)
    take_step(model, optimizer)
    block_lr.step(lambda: token_loss(model))
    take_step(model, optimizer)
    with pytest.raises(TypeError, match="Got a loss, not a function"):
        block_lr.step(token_loss(model))


@pytest.mark.parametrize("kind", BROKEN)
def test_a_refresh_that_may_pass_later_keeps_the_scales_and_warns_once(kind):
    closure, message = BROKEN[kind]
    model, optimizer, block_lr = attached(every=1, beta=0.0)
    for number, broken in enumerate([False, True, True, False, True, True]):
        take_step(model, optimizer, number)
        before = optimizer.block_scales()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        context = (
            pytest.warns(UserWarning, match=message) if number == 1 else warnings.catch_warnings()
        )
        with context:
            block_lr.step(lambda broken=broken: closure(model) if broken else token_loss(model))
        kept = all(
            torch.equal(scale, before[name]) for name, scale in optimizer.block_scales().items()
        )
        assert kept == broken
        assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
        assert model.training
    assert block_lr.failures == 4
    assert [refresh.step for refresh in block_lr.history] == [1, 4]
    take_step(model, optimizer)
    with pytest.raises(
        RuntimeError, match=r"3 refreshes .* in a row have failed, the last after step 7"
    ) as raised:
        block_lr.step(lambda: closure(model))
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_curvature_that_no_scale_can_be_made_of_is_a_failure(value):
    model = tiny_gpt()
    optimizer = OPTIMIZERS["sgd"](blockopt.param_groups(model))
    values = {
        name: torch.full((b.num_blocks,), value) for name, b in blockopt.find_blocks(model).items()
    }
    block_lr = BlockLR(optimizer, model, curvature=lambda *_: values, every=1)
    take_step(model, optimizer)
    if math.isfinite(value):  # once is common where a loss is not convex, twice is worth a word
        block_lr.step()
    else:
        with pytest.warns(UserWarning, match="not finite"):
            block_lr.step()
    assert block_lr.failures == 1
    assert all((scale == 1).all() for scale in optimizer.block_scales().values())
    for number in range(4):
        take_step(model, optimizer)
        if math.isfinite(value) and number == 0:
            with pytest.warns(UserWarning, match=r"No block .* positive .* pass curvature='gauss"):
                block_lr.step()
        elif math.isfinite(value) or block_lr.failures < 2:  # no reason to stop
            block_lr.step()
        else:
            with pytest.raises(RuntimeError, match="in a row"):
                block_lr.step()
    assert block_lr.failures == 5


def test_one_block_that_is_not_finite_is_a_failure():
    model = tiny_gpt()
    values = constant(model)(None, None)
    values["h.1.attn.c_attn.weight"][3] = math.nan
    optimizer = OPTIMIZERS["sgd"](blockopt.param_groups(model))
    block_lr = BlockLR(optimizer, model, curvature=lambda *_: values, every=1)
    take_step(model, optimizer)
    with pytest.warns(UserWarning, match="not finite"):
        block_lr.step()


@pytest.mark.parametrize(
    ("curvature", "closure", "error", "message"),
    [
        (
            "gauss_newton",
            lambda model: model(torch.zeros(1, 3, dtype=torch.long)).logsumexp(-1).sum(),
            ValueError,
            "No call of",
        ),
        ("gauss_newton", lambda model: model(torch.full((1, 3), 99)), IndexError, "out of range"),
        (
            lambda model, loss: {"wte.weight": torch.ones(19)},
            token_loss,
            ValueError,
            r"Invalid curvature: \['h\.0",
        ),
        (
            lambda model, loss: gradient(model),
            token_loss,
            ValueError,
            "No parameter has a gradient",
        ),
        (lambda model, loss: _raise(KeyError("batch")), token_loss, KeyError, "batch"),
        ("newton", lambda model: model(wrong_keyword=1), TypeError, "wrong_keyword"),
        ("newton", lambda model: (torch.ones(2, 3), None), TypeError, "take the second"),
        ("newton", lambda model: token_loss(model).item(), TypeError, r"returned \d"),
        ("newton", lambda model: token_loss(model).detach(), TypeError, "requires no gradient"),
        ("newton", lambda model: {"loss": token_loss(model)}, TypeError, "an object of type dict"),
        ("newton", lambda model: _raise(ValueError("a bug")), ValueError, "^a bug$"),
        ("newton", lambda model: _raise(FloatingPointError("mine")), FloatingPointError, "mine"),
    ],
)
def test_errors_that_will_not_pass_are_raised_at_once(curvature, closure, error, message):
    model, optimizer, block_lr = attached(curvature, every=1)
    take_step(model, optimizer)
    with pytest.raises(error, match=message):
        block_lr.step(lambda: closure(model))
    assert block_lr.failures == 0
    assert all(p.grad is not None for p in model.parameters())


LOOKS_AT_A_LOSS = [name for name, estimator in ESTIMATORS.items() if estimator.needs_loss]


@pytest.mark.parametrize("name", LOOKS_AT_A_LOSS)
def test_the_loss_of_a_copy_is_no_curvature_that_is_nowhere_positive(name):
    model, optimizer, block_lr = attached(name, every=1)
    copy = tiny_gpt()
    take_step(model, optimizer)
    with pytest.raises(ValueError, match="depends on no trainable parameter of the model"):
        block_lr.step(lambda: token_loss(copy))
    assert block_lr.failures == 0


def test_a_function_of_ones_own_must_give_one_value_a_block():
    model = tiny_gpt()
    values = constant(model)(None, None)
    values["wte.weight"] = torch.ones(3)
    optimizer = OPTIMIZERS["sgd"](blockopt.param_groups(model))
    block_lr = BlockLR(optimizer, model, curvature=lambda *_: values)
    take_step(model, optimizer)
    with pytest.raises(
        ValueError, match=r"Invalid curvature of shape \(3,\) for 'wte.weight'. Must be \(19,\)"
    ):
        block_lr.step()


def test_gradients_that_are_gone_are_asked_for():
    model, optimizer, block_lr = attached("gradient")
    take_step(model, optimizer)
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="before zero_grad"):
        block_lr.step()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_missing_loss_is_named_even_when_nothing_is_due(name):
    _, _, block_lr = attached(name)
    if not ESTIMATORS[name].needs_loss:
        block_lr.step()
    else:
        with pytest.raises(ValueError, match=f"curvature='{name}' needs a loss"):
            block_lr.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"curvature": "hessian"},
            r"Invalid curvature='hessian'. Must be one of 'newton', 'secant'",
        ),
        ({"every": 0}, "Invalid every=0. Must be an integer >= 1."),
        ({"every": 1.5}, "Invalid every=1.5"),
        ({"warmup": -1}, "Invalid warmup=-1. Must be an integer >= 0."),
        ({"warmup": None}, "Invalid warmup=None"),
        ({"beta": 1.0}, r"Invalid beta=1.0. Must be in \[0, 1\)."),
        ({"beta": -0.1}, "Invalid beta=-0.1"),
        ({"num_probes": 0}, "Invalid num_probes=0. Must be an integer >= 1."),
        ({"power": math.nan}, "Invalid power=nan. Must be finite."),
        ({"bounds": (2.0, 3.0)}, r"Invalid bounds=\(2.0, 3.0\)"),
        ({"by": "block"}, "Invalid by='block'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    model = tiny_gpt()
    with pytest.raises(ValueError, match=message):
        BlockLR(OPTIMIZERS["sgd"](blockopt.param_groups(model)), model, **options)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda m: blockopt.BlockAdamW(m.parameters(), lr=1e-3),
            ValueError,
            r"Build it with BlockAdamW\(blockopt.param_groups",
        ),
        (
            lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
            ValueError,
            r'AdamW\(blockopt.param_groups\(model, by="parameter"\)',
        ),
        (
            lambda m: blockopt.BlockSGD(blockopt.param_groups(tiny_gpt()), lr=1e-3),
            ValueError,
            r"none of the model's \(it has one of shape \(19, 16\)\)",
        ),
        (lambda m: torch.optim.Adafactor(blockopt.param_groups(m), lr=torch.ones(())), None, ""),
        (
            lambda m: object(),
            TypeError,
            "Invalid optimizer of type object. Must be a torch.optim.Optimizer",
        ),
    ],
)
def test_optimizers_that_it_cannot_serve_are_refused(build, error, message):
    model = tiny_gpt()
    if error is None:
        BlockLR(build(model), model)
    else:
        with pytest.raises(error, match=message):
            BlockLR(build(model), model)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"Invalid model of type list.* BlockLR\(optimizer, model"):
        BlockLR(OPTIMIZERS["sgd"](blockopt.param_groups(tiny_gpt())), [tiny_gpt()])


def test_groups_without_a_learning_rate_are_refused():
    model = tiny_gpt()
    optimizer = torch.optim.SGD(blockopt.param_groups(model), lr=0.1)
    optimizer.param_groups[1]["lr"] = None
    with pytest.raises(ValueError, match=r"Invalid lr=\[0.1, None"):
        BlockLR(optimizer, model)


def test_a_failed_refresh_frees_its_memory_at_once():
    model, optimizer, block_lr = attached(every=1)
    take_step(model, optimizer)
    held = []

    def loss():
        value = token_loss(model)
        held.append(weakref.ref(value))
        return value * math.nan

    gc.disable()
    try:
        with pytest.warns(UserWarning, match="nan"):
            block_lr.step(loss)
        assert held[0]() is None
    finally:
        gc.enable()
