"""At scale 1 the optimizers are those of `torch.optim`."""

import copy
import math

import pytest
import torch
from torch import nn

import blockopt
from tests.helpers.optimizers import (
    assert_same_weights,
    random_gradients,
    set_gradients,
    tiny_gpt,
    train,
)
from tests.helpers.reference_optimizers import newton_schulz


def run(model, optimizer, steps=6):
    for step in range(steps):
        set_gradients(model, random_gradients(model, seed=step))
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_adamw_equals_torch(kernel, dtype):
    ours, theirs = tiny_gpt(dtype=dtype), tiny_gpt(dtype=dtype)
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    run(ours, blockopt.BlockAdamW(ours.parameters(), **options))
    run(theirs, torch.optim.AdamW(theirs.parameters(), **options, **{kernel: True}))
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    assert_same_weights(ours, theirs, rtol=tolerance, atol=tolerance)


def test_adamw_without_fused_kernel_equals_torch(monkeypatch):
    monkeypatch.setattr("blockopt.optim.fused.FUSED_DEVICES", ())
    ours, theirs = tiny_gpt(), tiny_gpt()
    run(ours, blockopt.BlockAdamW(ours.parameters(), lr=3e-3))
    run(theirs, torch.optim.AdamW(theirs.parameters(), lr=3e-3, foreach=True))
    assert_same_weights(ours, theirs, rtol=1e-6, atol=1e-7)


def test_adamw_trains_as_torch_does():
    ours, theirs = tiny_gpt(), tiny_gpt()
    a = train(
        ours, blockopt.BlockAdamW(blockopt.param_groups(ours, weight_decay=0.0), lr=3e-3), range(20)
    )
    b = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=3e-3, weight_decay=0.0), range(20))
    assert a == pytest.approx(b, rel=1e-4)
    assert a[-1] < a[0]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_torch(momentum, nesterov):
    if nesterov and momentum == 0:
        with pytest.raises(ValueError, match="nesterov"):
            blockopt.BlockSGD(tiny_gpt().parameters(), nesterov=True)
        return
    ours, theirs = tiny_gpt(), tiny_gpt()
    options = {"lr": 0.1, "momentum": momentum, "nesterov": nesterov}
    run(ours, blockopt.BlockSGD(ours.parameters(), **options))
    run(theirs, torch.optim.SGD(theirs.parameters(), **options, foreach=True))
    assert_same_weights(ours, theirs, rtol=1e-6, atol=1e-6)


class Matrices(nn.Module):
    """Unfused attention and MLP without other parameters, all of which torch.optim.Muon takes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.num_heads = 2
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(16, 16, bias=False))
        self.mlp = nn.Module()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(16, 40, bias=False), nn.Linear(40, 16, bias=False)


def torch_muon(model, options):
    """Torch multiplies an update by the root of outputs over inputs, if there are more of them."""
    unit = 0.2 * math.sqrt(128)
    changed = {"lr": unit * options["lr"], "weight_decay": options["weight_decay"] / unit}
    return torch.optim.Muon(model.parameters(), **options | changed, adjust_lr_fn="original")


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_equals_torch_with_the_same_orthogonalization(nesterov, monkeypatch):
    """Torch takes five steps with fixed coefficients; with our four steps all else is the same."""
    monkeypatch.setattr("blockopt.optim.newton_schulz.CPU_DTYPE", torch.float32)
    monkeypatch.setattr(
        "torch.optim._muon._zeropower_via_newtonschulz", lambda x, *_: newton_schulz(x)
    )
    ours, theirs = Matrices(), Matrices()
    options = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    groups = blockopt.param_groups(ours, weight_decay=0.1)
    run(ours, blockopt.BlockMuon(groups, precondition=False, **options))
    run(theirs, torch_muon(theirs, options))
    for a, b, start in zip(ours.parameters(), theirs.parameters(), Matrices().parameters()):
        assert (a - b).norm() < 1e-5 * (b - start).norm()


def test_muon_moves_as_torch_does():
    """Both are rough orthogonal factors of the same momentum."""
    ours, theirs = Matrices(), Matrices()
    options = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.0}
    groups = blockopt.param_groups(ours, weight_decay=0.0)
    run(ours, blockopt.BlockMuon(groups, precondition=False, **options))
    run(theirs, torch_muon(theirs, options))
    for a, b, start in zip(ours.parameters(), theirs.parameters(), Matrices().parameters()):
        mine, others = (a - start).flatten(), (b - start).flatten()
        assert torch.cosine_similarity(mine, others, dim=0) > 0.98
        assert 0.9 < mine.norm() / others.norm() < 1.15


@pytest.mark.parametrize("transposed", [False, True])
def test_a_step_of_muon_changes_outputs_as_much_at_every_width(transposed):
    """The spectral norm does not depend on the width, however the weights are stored."""
    from transformers.pytorch_utils import Conv1D

    norms = {}
    for width in (16, 64):
        torch.manual_seed(0)
        model = nn.Module()
        model.c_fc, model.c_proj = (
            (Conv1D(4 * width, width), Conv1D(width, 4 * width))
            if transposed
            else (nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
        )
        mlp = nn.Module()
        mlp.mlp = model
        before = [p.detach().clone() for p in (model.c_fc.weight, model.c_proj.weight)]
        groups = blockopt.param_groups(mlp, weight_decay=0.0)
        run(mlp, blockopt.BlockMuon(groups, lr=1.0, precondition=False), steps=1)
        after = (model.c_fc.weight, model.c_proj.weight)
        norms[width] = [torch.linalg.matrix_norm(b - a, 2).item() for a, b in zip(before, after)]
    unit = 0.2 * math.sqrt(128)
    for found in norms.values():
        assert found == pytest.approx([2 * unit, unit], rel=0.25)  # four outputs per input, or one


def test_torch_checkpoint_goes_on_in_ours():
    ours, theirs = tiny_gpt(), tiny_gpt()
    torch_optimizer = torch.optim.AdamW(theirs.parameters(), lr=3e-3)
    train(theirs, torch_optimizer, range(5))
    ours.load_state_dict(theirs.state_dict())
    optimizer = blockopt.BlockAdamW(ours.parameters(), lr=3e-3)
    optimizer.load_state_dict(copy.deepcopy(torch_optimizer.state_dict()))
    train(ours, optimizer, range(5, 10))
    train(theirs, torch_optimizer, range(5, 10))
    assert_same_weights(ours, theirs, rtol=1e-4, atol=1e-5)


def test_sgd_without_fused_kernel_equals_torch(monkeypatch):
    monkeypatch.setattr("blockopt.optim.fused.FUSED_DEVICES", ())
    ours, theirs = tiny_gpt(), tiny_gpt()
    run(ours, blockopt.BlockSGD(ours.parameters(), lr=0.1, momentum=0.9, nesterov=True))
    run(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, nesterov=True))
    assert_same_weights(ours, theirs, rtol=1e-6, atol=1e-6)
