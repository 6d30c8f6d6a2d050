"""The contract of `torch.optim`, run over every optimizer."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

import blockopt
from tests.helpers.optimizers import (
    OPTIMIZERS,
    assert_same_weights,
    random_gradients,
    random_scales,
    set_gradients,
    tiny_gpt,
    token_loss,
    train,
)


@pytest.fixture(params=OPTIMIZERS)
def make(request):
    return OPTIMIZERS[request.param]


def test_loss_falls(make):
    model = tiny_gpt()
    optimizer = make(blockopt.param_groups(model))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = token_loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_closure_is_called_with_gradients_enabled_and_its_loss_returned(make):
    model, plain = tiny_gpt(), tiny_gpt()
    optimizer, other = make(blockopt.param_groups(model)), make(blockopt.param_groups(plain))

    def closure():
        optimizer.zero_grad()
        loss = token_loss(model)
        loss.backward()
        return loss

    returned = optimizer.step(closure)
    assert returned.item() == pytest.approx(token_loss(plain).item())
    train(plain, other, range(1))
    assert_same_weights(model, plain)


def test_maximize_climbs_what_minimize_descends(make):
    down, up = tiny_gpt(), tiny_gpt()
    gradients = random_gradients(down, seed=0)
    for model, sign, options in ((down, -1.0, {}), (up, 1.0, {"maximize": True})):
        optimizer = make(blockopt.param_groups(model), **options)
        for _ in range(3):
            set_gradients(model, {n: sign * g for n, g in gradients.items()})
            optimizer.step()
    assert_same_weights(down, up, rtol=1e-6, atol=1e-7)


def test_tensor_learning_rate(make):
    plain, tensor = tiny_gpt(), tiny_gpt()
    for model, lr in ((plain, 5e-3), (tensor, torch.tensor(5e-3))):
        optimizer = make(blockopt.param_groups(model), lr=lr)
        for step in range(4):
            set_gradients(model, random_gradients(model, step))
            optimizer.step()
    assert_same_weights(plain, tensor, rtol=1e-5, atol=1e-6)


def test_schedule_and_scales_commute(make):
    """A schedule writes group["lr"] only, scales may be set at any time; a step multiplies both."""
    first, second = tiny_gpt(), tiny_gpt()
    a, b = make(blockopt.param_groups(first)), make(blockopt.param_groups(second))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        a, max_lr=1e-2, total_steps=6, cycle_momentum=False
    )
    rates = []
    a.set_block_scales(random_scales(a))
    for step in range(5):
        rates.append(a.param_groups[0]["lr"])
        set_gradients(first, random_gradients(first, step))
        a.step()
        schedule.step()
    assert len(set(rates)) == 5
    for step, rate in enumerate(rates):
        for group in b.param_groups:
            group["lr"] = rate
        b.set_block_scales(random_scales(b))
        set_gradients(second, random_gradients(second, step))
        b.step()
    assert_same_weights(first, second)


def test_gradients_are_never_written(make):
    model = tiny_gpt()
    optimizer = make(blockopt.param_groups(model), maximize=True)
    for _ in range(2):
        set_gradients(model, random_gradients(model, 0))
        before = {n: p.grad.clone() for n, p in model.named_parameters()}
        versions = {n: p.grad._version for n, p in model.named_parameters()}
        optimizer.step()
        for name, p in model.named_parameters():
            assert torch.equal(p.grad, before[name])
            assert p.grad._version == versions[name]


def test_parameters_without_gradient_stay(make):
    model = tiny_gpt()
    optimizer = make(blockopt.param_groups(model))
    for step in range(3):
        set_gradients(model, random_gradients(model, step))
        if step != 1:
            model.h[0].mlp.c_fc.weight.grad = None
            model.ln_f.bias.grad = None
        before = model.h[0].mlp.c_fc.weight.detach().clone(), model.ln_f.bias.detach().clone()
        optimizer.step()
        moved = (
            not torch.equal(before[0], model.h[0].mlp.c_fc.weight),
            not torch.equal(before[1], model.ln_f.bias),
        )
        assert moved == (step == 1, step == 1)


def test_step_without_any_gradient_does_nothing_and_says_so(make):
    model = tiny_gpt()
    before = copy.deepcopy(model)
    optimizer = make(blockopt.param_groups(model))
    token_loss(before).backward()  # of another model than the optimizer's
    with pytest.warns(UserWarning, match="No parameter of this Block.* has a gradient") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    assert_same_weights(model, before)
    train(model, optimizer, range(1))
    optimizer.zero_grad()
    optimizer.step()  # from then on as in `torch.optim`: nothing, in silence


def test_gradient_scaler_accumulation_and_clipping(make):
    plain, scaled = tiny_gpt(), tiny_gpt()
    a, b = make(blockopt.param_groups(plain)), make(blockopt.param_groups(scaled))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        a.zero_grad()
        b.zero_grad()
        for micro in range(2):
            (token_loss(plain, seed=10 * step + micro) / 2).backward()
            scaler.scale(token_loss(scaled, seed=10 * step + micro) / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        a.step()
        scaler.unscale_(b)
        nn.utils.clip_grad_norm_(scaled.parameters(), 0.5)
        scaler.step(b)
        scaler.update()
    assert_same_weights(plain, scaled, rtol=1e-5, atol=1e-6)


def test_gradient_scaler_skips_an_overflow(make):
    model, untouched = tiny_gpt(), tiny_gpt()
    optimizer = make(blockopt.param_groups(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(token_loss(model) * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert optimizer.nonfinite_steps == 0
    assert_same_weights(model, untouched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["state_dict", "weights_only", "pickle", "deepcopy"])
def test_resume_is_bit_identical(make, way, dtype):
    model = tiny_gpt(dtype=dtype)
    optimizer = make(blockopt.param_groups(model))
    optimizer.set_block_scales(random_scales(optimizer))
    train(model, optimizer, range(4))
    other = tiny_gpt(seed=1, dtype=dtype)
    if way == "deepcopy":
        other, resumed = copy.deepcopy((model, optimizer))
    elif way == "pickle":
        other, resumed = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        other.load_state_dict(saved["model"])
        resumed = make(blockopt.param_groups(other), lr=1.0)
        resumed.load_state_dict(saved["optimizer"])
    assert train(model, optimizer, range(4, 8)) == train(other, resumed, range(4, 8))
    assert_same_weights(model, other)
    for name, scale in optimizer.block_scales().items():
        assert torch.equal(scale, resumed.block_scales()[name])


def test_added_group_is_like_one_given_at_the_start(make):
    whole, grown = tiny_gpt(), tiny_gpt()
    groups = blockopt.param_groups(grown)
    a, b = make(blockopt.param_groups(whole)), make(groups[:-1])
    b.add_param_group(groups[-1])
    train(whole, a, range(3))
    train(grown, b, range(3))
    assert_same_weights(whole, grown)


def test_deep_copied_state_is_not_shared(make):
    model = tiny_gpt()
    optimizer = make(blockopt.param_groups(model))
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 4))
    now, constant = optimizer.state_dict()["state"][0], ("scale", "column_probes")
    for name, value in saved["state"][0].items():
        assert torch.equal(value, now[name]) == (name in constant), name


def test_groups_hold_plain_data_only(make):
    optimizer = make(blockopt.param_groups(tiny_gpt()))

    def plain(value):
        if isinstance(value, (list, tuple)):
            return type(value) in (list, tuple) and all(map(plain, value))
        return (
            value is None
            or type(value) in (str, int, float, bool)
            or isinstance(value, torch.dtype)
        )

    for group in optimizer.state_dict()["param_groups"]:
        assert all(plain(value) for value in group.values()), group


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["wte.weight", "h.1.attn.c_attn.weight", "ln_f.bias"])
def test_nonfinite_gradient_changes_nothing(make, place, value):
    model, twin = tiny_gpt(), tiny_gpt()
    a, b = make(blockopt.param_groups(model), nonfinite="skip"), make(blockopt.param_groups(twin))
    train(model, a, range(2))
    train(twin, b, range(2))
    for attempt in range(2):
        gradients = random_gradients(model, 0)
        gradients[place].view(-1)[-1] = value
        set_gradients(model, gradients)
        if attempt == 0:
            with pytest.warns(
                UserWarning, match=f"Non-finite gradient in 1 of .* parameters .{place}"
            ):
                a.step()
        else:
            a.step()
    assert a.nonfinite_steps == 2
    set_gradients(twin, gradients)
    with pytest.raises(FloatingPointError, match="No weight and no state was changed"):
        b.step()
    assert b.nonfinite_steps == 1
    train(model, a, range(2, 4))
    clean = tiny_gpt()
    train(clean, make(blockopt.param_groups(clean)), range(4))
    train(twin, b, range(2, 4))
    assert_same_weights(model, clean)
    assert_same_weights(twin, clean)


def test_ignoring_changes_nothing_while_gradients_are_finite(make):
    checked, ignored = tiny_gpt(), tiny_gpt()
    train(checked, make(blockopt.param_groups(checked)), range(3))
    train(ignored, make(blockopt.param_groups(ignored), nonfinite="ignore"), range(3))
    assert_same_weights(checked, ignored)


def test_weight_decay_of_the_optimizer_reaches_matrices_only():
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(tiny_gpt()), weight_decay=0.03)
    decays = {
        name: group["weight_decay"]
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert decays["h.0.mlp.c_fc.weight"] == decays["wte.weight"] == 0.03
    assert decays["ln_f.weight"] == decays["h.0.mlp.c_fc.bias"] == 0.0


def test_checkpoint_that_does_not_fit_is_refused():
    model = tiny_gpt()
    block = blockopt.BlockAdamW(blockopt.param_groups(model), second_moment="block")
    train(model, block, range(1))
    saved = block.state_dict()
    for group in saved["param_groups"]:
        group["second_moment"] = "coordinate"
    with pytest.raises(
        ValueError, match=r"'exp_avg_sq' of 'wte\.weight' has shape \(19,\). Must be \(19, 16\)"
    ):
        blockopt.BlockAdamW(blockopt.param_groups(model)).load_state_dict(saved)
    amsgrad = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, amsgrad, range(1))
    with pytest.raises(ValueError, match=r"'max_exp_avg_sq'.*does not know"):
        blockopt.BlockAdamW(model.parameters()).load_state_dict(amsgrad.state_dict())


def test_state_keeps_its_dtype_behind_a_load_hook():
    """A hook that reorders the checkpoint is obeyed also where dtypes are put right."""
    first, second = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = blockopt.BlockAdamW([first, second])
    first.grad, second.grad = torch.ones_like(first), 3 * torch.ones_like(second)
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() / 3
    saved = copy.deepcopy(optimizer.state_dict())
    other = blockopt.BlockAdamW([second, first])
    other.register_load_state_dict_pre_hook(
        lambda _, d: {**d, "state": {0: d["state"][1], 1: d["state"][0]}}
    )
    other.load_state_dict(saved)
    for parameter in (first, second):
        assert other.state[parameter]["exp_avg"].dtype == torch.float32
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_momentum_turned_on_later_starts_from_zero():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = blockopt.BlockSGD([weight], lr=1.0)
    for momentum in (0.0, 0.5, 0.5):
        optimizer.param_groups[0]["momentum"] = momentum
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.tolist() == [-1 - 1 - 1.5] * 2
