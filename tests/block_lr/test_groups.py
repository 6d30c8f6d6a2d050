"""BlockLR on optimizers other than blockopt's: what their step and their schedule see."""

import copy
import math

import pytest
import schedulefree
import torch
import torch_optimizer
import transformers

import blockopt
from blockopt.block_lr import BlockLR
from blockopt.block_lr.scales import block_scales
from blockopt.blocks.split import block_numel
from tests.helpers.block_lr import BUILD
from tests.helpers.models import FAMILIES, timm_vision_transformer
from tests.helpers.optimizers import (
    assert_same_weights,
    random_gradients,
    set_gradients,
    tiny_gpt,
    token_loss,
)

# That of all optimizers but SGD, so that one expectation serves all of them.
ROOT_RULE = {"power": -0.5, "bounds": (0.1, 10.0)}

STEPS = 6
OPTIMIZERS = {
    "adamw": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, weight_decay=0.1),
    "adamw-tensor-lr": lambda groups, lr: torch.optim.AdamW(
        groups, lr=torch.tensor(lr), weight_decay=0.1
    ),
    "sgd": lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9),
    "adamax": lambda groups, lr: torch.optim.Adamax(groups, lr=lr),
    "lamb": lambda groups, lr: torch_optimizer.Lamb(groups, lr=lr),
    "lookahead": lambda groups, lr: torch_optimizer.Lookahead(torch.optim.SGD(groups, lr=lr)),
}


def by_role(model):
    """A fixed curvature that differs by role."""
    roles = {"query": 0.1, "key": 0.3, "value": 2.0, "norm": 9.0, "embedding": 30.0, "mlp_in": 0.5}
    found = blockopt.find_blocks(model)
    values = {
        name: torch.tensor([roles.get(role, 1.0) for role in entry.block_roles])
        for name, entry in found.items()
    }
    return lambda *_: values


def take_step(model, optimizer, seed=0):
    optimizer.zero_grad()
    token_loss(model, seed).backward()
    optimizer.step()


def group_means(model, groups):
    """Geometric mean of the scales of each group's blocks, entry by entry."""
    scales = block_scales(by_role(model)(), model)
    blocks, shapes = (
        blockopt.find_blocks(model),
        {name: tuple(p.shape) for name, p in model.named_parameters()},
    )
    means = []
    for group in groups:
        numel = torch.cat(
            [block_numel(shapes[name], blocks[name].split) for name in group["param_names"]]
        )
        logs = torch.cat([scales[name].double().log() for name in group["param_names"]])
        means.append(math.exp(float((numel * logs).sum() / numel.sum())))
    return means


@pytest.mark.parametrize("by", ["parameter", "role"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore::UserWarning:torch_optimizer")
def test_the_step_is_that_with_learning_rates_multiplied_by_hand(name, by):
    model, reference = tiny_gpt(), tiny_gpt()
    optimizer = OPTIMIZERS[name](blockopt.param_groups(model, by=by), 1e-2)
    by_hand = OPTIMIZERS[name](blockopt.param_groups(reference, by=by), 1e-2)
    block_lr = BlockLR(optimizer, model, beta=0.0, curvature=by_role(model), **ROOT_RULE, every=3)
    means = group_means(model, optimizer.param_groups)
    assert len({round(mean, 6) for mean in means}) > 4
    for number in range(STEPS):
        take_step(model, optimizer, number)
        take_step(reference, by_hand, number)
        block_lr.step()
        if number == 0:
            for group, mean in zip(by_hand.param_groups, means, strict=True):
                group["lr"] = group["lr"] * mean
    assert_same_weights(model, reference, rtol=1e-6, atol=1e-8)
    assert all(float(group["lr"]) == pytest.approx(1e-2) for group in optimizer.param_groups)
    applied = block_lr.last_scales.as_dict()
    for group, mean in zip(optimizer.param_groups, means):
        for parameter_name in group["param_names"]:  # the table tells what is applied
            torch.testing.assert_close(
                applied[parameter_name], torch.full_like(applied[parameter_name], mean)
            )


def test_schedule_free_learning_rates_are_scaled():
    model = tiny_gpt()
    optimizer = schedulefree.AdamWScheduleFree(
        blockopt.param_groups(model, by="parameter"), lr=1e-2
    )
    optimizer.train()
    block_lr = BlockLR(optimizer, model, beta=0.0, curvature=by_role(model), **ROOT_RULE)
    take_step(model, optimizer)
    block_lr.step()
    take_step(model, optimizer)
    assert all(group["lr"] == 1e-2 for group in optimizer.param_groups)
    scales = block_lr.last_scales.as_dict()
    ratios = [
        group["scheduled_lr"] / float(scales[group["param_names"][0]][0])
        for group in optimizer.param_groups
    ]
    assert len({round(group["scheduled_lr"], 9) for group in optimizer.param_groups}) > 1
    torch.testing.assert_close(ratios, [ratios[0]] * len(ratios))


def test_groups_without_blocks_of_their_own_get_those_of_the_model():
    model = tiny_gpt()
    groups = [{"params": group["params"]} for group in blockopt.param_groups(model)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    block_lr = BlockLR(optimizer, model, beta=0.0, curvature=by_role(model), **ROOT_RULE)
    take_step(model, optimizer)
    block_lr.step()
    set_gradients(model, {name: torch.ones_like(p) for name, p in model.named_parameters()})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    groups = optimizer.param_groups
    for group, mean in zip(groups, group_means(model, groups)):
        for name in group["param_names"]:
            moved = before[name] - dict(model.named_parameters())[name].detach()
            torch.testing.assert_close(moved, torch.full_like(moved, mean), rtol=1e-4, atol=1e-5)


def test_a_group_of_several_roles_is_refused():
    """As in nanoGPT and the Trainer: one group with weight decay, one without."""
    model = tiny_gpt()
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}], lr=1e-3)
    message = (
        r"mixes the roles embedding, mlp_in, mlp_out, output, position, query\+key\+value, so "
        r"they.*AdamW\(blockopt.param_groups\(model, by=\"parameter\"\), ...\)"
    )
    with pytest.raises(ValueError, match=message):
        BlockLR(optimizer, model)


def test_a_group_of_frozen_parameters_is_left_alone():
    model = tiny_gpt()
    model.wpe.weight.requires_grad_(False)
    groups = [
        *blockopt.param_groups(model, by="parameter"),
        {"params": [("wpe.weight", model.wpe.weight)]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    block_lr = BlockLR(optimizer, model, beta=0.0, curvature=by_role(model), **ROOT_RULE)
    take_step(model, optimizer)
    block_lr.step()
    take_step(model, optimizer)
    assert "wpe.weight" not in block_lr.last_scales.as_dict()
    assert block_lr._hooks._multipliers[-1] == 1.0


def timm_cosine(optimizer):
    timm_vision_transformer()  # imports timm without torchvision
    from timm.scheduler import CosineLRScheduler

    return CosineLRScheduler(
        optimizer, t_initial=STEPS, warmup_t=2, warmup_lr_init=1e-4, t_in_epochs=False
    )


SCHEDULERS = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1) / 3
    ),
    "one-cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-2, total_steps=STEPS + 2
    ),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
    "warmup": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=0, threshold=1e3
    ),
    "huggingface": lambda optimizer: transformers.get_cosine_schedule_with_warmup(
        optimizer, 2, STEPS
    ),
    "timm": timm_cosine,
}


def rates_of_a_run(scheduler_name, build, with_block_lr):
    model = tiny_gpt()
    optimizer = build(model)
    scheduler = SCHEDULERS[scheduler_name](optimizer)
    block_lr = BlockLR(optimizer, model, curvature="gradient", every=2) if with_block_lr else None
    rates, seen = [], []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([float(group["lr"]) for group in optimizer.param_groups])
    )
    for number in range(STEPS):
        take_step(model, optimizer, number)
        if scheduler_name == "timm":
            scheduler.step_update(number + 1)
        elif scheduler_name == "plateau":
            scheduler.step(1.0)
        else:
            scheduler.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        if block_lr is not None:
            block_lr.step()
    return rates, seen


@pytest.mark.parametrize("optimizer_name", BUILD)
@pytest.mark.parametrize("scheduler_name", SCHEDULERS)
def test_every_schedule_goes_its_own_way(scheduler_name, optimizer_name):
    build = BUILD[optimizer_name]
    expected, plain = rates_of_a_run(scheduler_name, build, with_block_lr=False)
    rates, scaled = rates_of_a_run(scheduler_name, build, with_block_lr=True)
    assert rates == expected
    assert len({row[0] for row in rates}) > 1
    assert scaled[0] == plain[0]  # before the first refresh
    assert (scaled[1:] == plain[1:]) == (
        optimizer_name == "block"
    )  # the scales of blockopt's optimizers live elsewhere


@pytest.mark.parametrize("tensor", [False, True])
def test_the_very_same_learning_rate_is_put_back(tensor):
    model = tiny_gpt()
    lr = torch.tensor(1e-2) if tensor else 1e-2
    optimizer = torch.optim.AdamW(blockopt.param_groups(model, by="parameter"), lr=lr)
    block_lr = BlockLR(optimizer, model, beta=0.0, curvature=by_role(model), **ROOT_RULE)
    take_step(model, optimizer)
    block_lr.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    take_step(model, optimizer)
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates))
    assert float(lr) == pytest.approx(1e-2)


class Raising(torch.optim.SGD):
    """Raises in its second step; in others it calls the step of its base, which has hooks too."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 2:
            raise ArithmeticError
        return super().step(closure)


def raised(model):
    optimizer = Raising(blockopt.param_groups(model, by="parameter"), lr=0.1)
    block_lr = BlockLR(optimizer, model, beta=0.0, curvature=by_role(model), **ROOT_RULE, every=1)
    take_step(model, optimizer)
    block_lr.step()
    with pytest.raises(ArithmeticError):
        take_step(model, optimizer)
    return optimizer, block_lr


def test_a_step_that_raised_does_not_leave_its_learning_rate_in_a_checkpoint():
    optimizer, block_lr = raised(tiny_gpt())
    assert {group["lr"] for group in optimizer.param_groups} != {0.1}
    assert {group["lr"] for group in optimizer.state_dict()["param_groups"]} == {0.1}
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}
    assert block_lr.num_steps == 1


def assert_scaled_once(model, optimizer):
    """The next step sees 0.1 times the mean scale of each group."""
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([group["lr"] for group in optimizer.param_groups])
    )
    take_step(model, optimizer)
    assert seen[0] == pytest.approx(
        [0.1 * mean for mean in group_means(model, optimizer.param_groups)]
    )


def test_a_step_that_raised_does_not_multiply_twice():
    model = tiny_gpt()
    optimizer, _ = raised(model)
    assert_scaled_once(model, optimizer)
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}


def test_block_lr_step_puts_back_what_a_step_that_raised_has_left():
    optimizer, block_lr = raised(tiny_gpt())
    block_lr.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}


def test_a_schedule_that_sets_the_learning_rate_after_a_step_that_raised_is_obeyed():
    model = tiny_gpt()
    optimizer, _ = raised(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    take_step(model, optimizer)
    assert {group["lr"] for group in optimizer.param_groups} == {0.05}


def test_a_second_one_does_not_multiply_on_top_of_the_first():
    model = tiny_gpt()
    optimizer = torch.optim.SGD(blockopt.param_groups(model, by="parameter"), lr=0.1)
    for _ in range(2):
        block_lr = BlockLR(optimizer, model, beta=0.0, curvature=by_role(model), **ROOT_RULE)
        take_step(model, optimizer)
        block_lr.step()
    assert_scaled_once(model, optimizer)


def test_a_group_added_later_is_scaled_from_the_next_refresh_on():
    model = tiny_gpt()
    groups = blockopt.param_groups(model, by="parameter")
    optimizer = torch.optim.SGD(groups[:-1], lr=0.1)
    block_lr = BlockLR(optimizer, model, beta=0.0, curvature=by_role(model), **ROOT_RULE, every=1)
    seen = []
    for number in range(4):
        if number == 2:
            optimizer.add_param_group(groups[-1])
            optimizer.register_step_pre_hook(
                lambda *_: seen.append(optimizer.param_groups[-1]["lr"])
            )
        take_step(model, optimizer)
        block_lr.step()
    assert seen == [0.1, pytest.approx(0.1 * group_means(model, optimizer.param_groups)[-1])]


def test_a_copy_of_the_optimizer_is_not_attached():
    model = tiny_gpt()
    optimizer = torch.optim.SGD(blockopt.param_groups(model, by="parameter"), lr=0.1)
    block_lr = BlockLR(optimizer, model, beta=0.0, curvature=by_role(model), **ROOT_RULE)
    copied = copy.deepcopy(optimizer)
    copied.step()
    assert block_lr.num_steps == 0


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
@pytest.mark.parametrize("kind", ["block", "torch"])
def test_a_compiled_step_is_not_compiled_again(kind):
    torch._dynamo.reset()
    eager, compiled = FAMILIES["mlp"](), FAMILIES["mlp"]()
    steps = []
    for model in (eager, compiled):
        if kind == "block":
            optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), lr=torch.tensor(1e-2))
        else:
            optimizer = torch.optim.AdamW(
                blockopt.param_groups(model, by="parameter"), lr=torch.tensor(1e-2)
            )
        block_lr = BlockLR(optimizer, model, curvature="gradient", every=2)
        steps.append(
            (
                model,
                torch.compile(optimizer.step, backend="aot_eager")
                if model is compiled
                else optimizer.step,
                block_lr,
            )
        )
    for number in range(STEPS):
        gradients = random_gradients(eager, number)
        for model, step, block_lr in steps:
            if number == 0:
                set_gradients(model, gradients)
            for name, parameter in model.named_parameters():
                parameter.grad.copy_(gradients[name])
            with torch._dynamo.config.patch(error_on_recompile=number >= 2):
                step()
            block_lr.step()
    assert [refresh.step for refresh in block_lr.history] == [1, 3, 5]
    assert_same_weights(eager, compiled, rtol=1e-5, atol=1e-5)
