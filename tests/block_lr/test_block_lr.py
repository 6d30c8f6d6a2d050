"""BlockLR on blockopt's optimizers: what the scales become."""

import gc
import math
import random
import weakref

import pytest
import torch
from torch import nn

import blockopt
from blockopt.block_lr import BlockLR
from blockopt.block_lr.scales import block_scales
from blockopt.block_lr.smoothing import Smoothing
from blockopt.curvature import gauss_newton, gradient
from tests.helpers.block_lr import attached, constant, take_step, weighted_mean_log
from tests.helpers.optimizers import OPTIMIZERS, tiny_gpt, token_loss

pytestmark = pytest.mark.filterwarnings("ignore:No block had a positive curvature")


@pytest.mark.parametrize("by", ["role", "layer", "tensor", "head"])
@pytest.mark.parametrize("optimizer_name", ["adamw-block", "sgd", "muon"])
def test_scales_are_those_of_the_curvature_smoothed_in_logarithm(optimizer_name, by):
    """`Smoothing` has tests of its own; here it is the one that is applied, with mean 0."""
    options = {"power": -0.7, "bounds": (0.3, 4.0), "by": by}
    model, optimizer, block_lr = attached(
        lambda model, loss: gradient_of(loss),
        optimizer_name,
        every=1,
        beta=0.6,
        rows=False,
        **options,
    )

    def gradient_of(loss):
        loss().backward()
        return gradient(model)

    smoothing = Smoothing(0.6)
    for number in range(3):
        take_step(model, optimizer, number)
        model.zero_grad()
        token_loss(model, 9 + number).backward()
        new = block_scales(gradient(model), model, **options)
        smoothing.add({name: scale.double().log() for name, scale in new.items()})
        expected = {name: log.exp().float() for name, log in smoothing.logs().items()}
        shift = math.exp(weighted_mean_log(model, expected))
        block_lr.step(lambda number=number: token_loss(model, 9 + number))
        for name, scale in optimizer.block_scales().items():
            torch.testing.assert_close(scale, expected[name] / shift, rtol=1e-5, atol=0)
            assert torch.equal(scale, block_lr.last_scales.as_dict()[name])
        assert abs(weighted_mean_log(model, optimizer.block_scales())) < 1e-6
    assert (
        len({round(float(s), 4) for scale in optimizer.block_scales().values() for s in scale}) > 3
    )


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_the_first_refresh_moves_the_scales_by_its_share(beta):
    model, optimizer, block_lr = attached(every=1, beta=beta)
    take_step(model, optimizer)
    block_lr.step(lambda: token_loss(model, 1))
    measured = block_scales(dict(_seen(model, block_lr, seed=1)), model)
    for name, scale in optimizer.block_scales().items():
        torch.testing.assert_close(scale, measured[name] ** (1 - beta), rtol=1e-5, atol=0)


def _seen(model, block_lr, seed):
    bits = random.Random(f"0 {block_lr.num_steps}").getrandbits(32)
    return gauss_newton(
        model, lambda: token_loss(model, seed), generator=torch.Generator().manual_seed(bits)
    )


def test_samples_depend_on_seed_and_step_and_nothing_else():
    def scales(seed, warmup):
        torch.manual_seed(seed + warmup)  # of no influence
        model, optimizer, block_lr = attached(every=1, warmup=warmup, seed=seed)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(warmup + 1):
            take_step(model, optimizer)
            block_lr.step(lambda: token_loss(model, 9))
        return torch.cat(list(optimizer.block_scales().values()))

    assert torch.equal(scales(0, 0), scales(0, 0))
    assert not torch.equal(scales(0, 0), scales(1, 0))
    assert not torch.equal(scales(0, 0), scales(0, 1))


def test_several_closures_are_averaged_by_tokens():
    results = []
    for losses in (
        lambda model: [lambda: (token_loss(model, 1), 10), lambda: (token_loss(model, 2), 30)],
        lambda model: lambda: (token_loss(model, 1) + 3 * token_loss(model, 2)) / 4,
    ):
        model, optimizer, block_lr = attached("directional", every=1)
        take_step(model, optimizer)
        block_lr.step(losses(model))
        results.append(block_lr.history[0].curvature)
    assert results[0] == pytest.approx(results[1], rel=1e-3)


def test_more_probes_are_passed_on():
    def curvature(num_probes):
        model, optimizer, block_lr = attached(num_probes=num_probes)
        take_step(model, optimizer)
        block_lr.step(lambda: token_loss(model))
        return block_lr.history[0].curvature

    assert curvature(1) != curvature(2)


def test_the_blocks_are_those_of_the_optimizer():
    model = tiny_gpt()
    blocks = blockopt.find_blocks(model, per_row=(), per_head=False)
    optimizer = blockopt.BlockSGD(blockopt.param_groups(model, blocks), lr=0.1)
    block_lr = BlockLR(optimizer, model, every=1, by="head", beta=0.0, power=-0.5)
    take_step(model, optimizer)
    block_lr.step(lambda: token_loss(model))
    assert {name: len(scale) for name, scale in block_lr.last_scales.as_dict().items()} == {
        name: entry.num_blocks for name, entry in blocks.items()
    }
    assert len(optimizer.block_scales()["h.0.attn.c_attn.weight"]) == 3


def test_blocks_that_the_optimizer_lacks_are_found():
    model = tiny_gpt()
    whole = blockopt.find_blocks(model, per_row=())
    groups = [group for group in blockopt.param_groups(model, whole) if group["role"] == "mlp_in"]
    block_lr = BlockLR(blockopt.BlockSGD(groups, lr=0.1), model, beta=0.0)
    found = {name: len(scale) for name, scale in block_lr.last_scales.as_dict().items()}
    assert found["h.0.mlp.c_fc.weight"] == 1
    assert found["h.0.mlp.c_proj.weight"] == 16
    assert found["wte.weight"] == 19


def test_parameters_that_another_optimizer_has_are_measured_but_not_set():
    model = tiny_gpt()
    groups = [
        group for group in blockopt.param_groups(model) if group["role"] in ("mlp_in", "mlp_out")
    ]
    optimizer = blockopt.BlockSGD(groups, lr=0.1)
    curvature, power = constant(model, mlp_in=4.0, embedding=0.01), -0.5
    block_lr = BlockLR(optimizer, model, curvature=curvature, every=1, beta=0.0, power=power)
    take_step(model, optimizer)
    block_lr.step(lambda: token_loss(model))
    expected = block_scales(curvature(None, None), model, power=power, bounds=(1e-3, 1e3))
    for name, scale in optimizer.block_scales().items():
        torch.testing.assert_close(scale, expected[name])
    assert set(optimizer.block_scales()) == {
        n for n, b in blockopt.find_blocks(model).items() if b.roles[0].startswith("mlp")
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_of_a_wrapped_model_are_matched_by_parameter():
    model = tiny_gpt()
    optimizer = blockopt.BlockSGD(blockopt.param_groups(model), lr=0.1)
    block_lr = BlockLR(
        optimizer,
        torch.compile(model),
        every=1,
        curvature="gradient",
        beta=0.0,
        power=-0.5,
        bounds=(0.1, 10),
        rows=False,
    )
    take_step(model, optimizer)
    block_lr.step()
    expected = block_scales(gradient(model), model)
    for name, scale in optimizer.block_scales().items():
        torch.testing.assert_close(scale, expected[name])


def test_parameters_may_be_replaced_after_it_was_made():
    model, optimizer, block_lr = attached("gradient", every=1, beta=0.0)
    for group in optimizer.param_groups:
        for index, (name, old) in enumerate(zip(group["param_names"], group["params"])):
            new = nn.Parameter(old.detach().clone())
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, new)
            group["params"][index] = new
    model.lm_head.weight = model.wte.weight
    take_step(model, optimizer)
    block_lr.step()
    expected = block_scales(gradient(model), model)
    for name, scale in optimizer.block_scales().items():
        torch.testing.assert_close(scale, expected[name])


def test_parameters_may_be_frozen_and_thawed_in_between():
    model, optimizer, block_lr = attached(every=1, bounds=(1e-3, 1e3))
    take_step(model, optimizer)
    block_lr.step(lambda: token_loss(model))
    before = optimizer.block_scales()["wpe.weight"]
    model.wpe.weight.requires_grad_(False)
    take_step(model, optimizer)
    block_lr.step(lambda: token_loss(model))
    assert torch.equal(optimizer.block_scales()["wpe.weight"], before)
    model.wpe.weight.requires_grad_(True)
    take_step(model, optimizer)
    block_lr.step(lambda: token_loss(model))
    assert not torch.equal(optimizer.block_scales()["wpe.weight"], before)


@pytest.mark.parametrize("curvature", ["directional", "secant", "newton"])
def test_curvature_along_the_update_gets_the_update_of_the_step_before(curvature, monkeypatch):
    seen = []

    def spy(model, losses, update, *, blocks, **options):
        seen.append((update, options))
        return {name: torch.arange(1.0, entry.num_blocks + 1) for name, entry in blocks.items()}

    estimator = "newton" if curvature == "newton" else "directional"
    monkeypatch.setattr(f"blockopt.curvature.{estimator}", spy)
    model, optimizer, block_lr = attached(curvature, every=2, by="layer")
    for number in range(3):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        scales = optimizer.block_scales()
        take_step(model, optimizer, number)
        copies = block_lr._hooks._before
        assert (copies is not None) == (number != 1)
        block_lr.step(lambda: token_loss(model))
        assert block_lr._hooks._before is None
        if number != 1:
            update, options = seen[-1]
            if curvature == "newton":
                assert options["by"] == "layer"
                assert all(
                    torch.equal(scale, scales[name]) for name, scale in options["scales"].items()
                )
                assert (number == 0) == all(
                    (scale == 1).all() for scale in options["scales"].values()
                )
            else:
                assert options == {
                    "method": {"directional": "exact", "secant": "secant"}[curvature]
                }
            for name, p in model.named_parameters():
                torch.testing.assert_close(update[name], p.detach() - before[name], rtol=0, atol=0)
                assert update[name].any()
    assert len(seen) == 2


@pytest.mark.parametrize("curvature", ["directional", "secant", "newton", "gauss_newton"])
def test_a_schedule_that_starts_at_zero_postpones_what_needs_an_update(curvature):
    model, optimizer, block_lr = attached(curvature, every=10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: max(0, step - 1) / 10
    )  # 0, 0, 0.1, …
    for number in range(4):
        take_step(model, optimizer, number)
        scheduler.step()
        block_lr.step(lambda number=number: token_loss(model, number))
    assert [refresh.step for refresh in block_lr.history] == [
        1 if curvature == "gauss_newton" else 3
    ]
    assert block_lr.failures == 0


def test_a_second_one_takes_the_place_of_the_first():
    model, optimizer, first = attached("gradient", every=1)
    second = BlockLR(optimizer, model, curvature="gradient", every=1)
    take_step(model, optimizer)
    assert (first.num_steps, second.num_steps) == (0, 1)
    with pytest.raises(RuntimeError, match="Another BlockLR has taken the place"):
        first.step()
    second.step()
    assert len(second.history) == 1
    with pytest.raises(ValueError, match="Invalid power"):
        BlockLR(optimizer, model, power=math.nan)
    take_step(model, optimizer)
    second.step()  # is still in place
    assert len(second.history) == 2


def test_nothing_keeps_model_and_optimizer_alive():
    def refreshed():
        model, optimizer, block_lr = attached("secant", every=1)
        take_step(model, optimizer)
        block_lr.step(lambda: token_loss(model))
        return [weakref.ref(x) for x in (model, optimizer, block_lr)]

    references = refreshed()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


@pytest.mark.parametrize(("name", "power"), [("sgd", -1.0), ("adamw", -0.5), ("muon", -0.5)])
def test_sgd_divides_by_the_curvature_and_others_by_its_root(name, power):
    model = tiny_gpt()
    optimizer = OPTIMIZERS[name](blockopt.param_groups(model))
    block_lr = BlockLR(optimizer, model, curvature=constant(model, mlp_in=9.0), beta=0.0)
    take_step(model, optimizer)
    block_lr.step(lambda: token_loss(model))
    scales = optimizer.block_scales()
    ratio = scales["h.0.mlp.c_fc.weight"][0] / scales["h.0.mlp.c_proj.weight"][0]
    assert float(ratio) == pytest.approx(9.0**power, rel=1e-5)
