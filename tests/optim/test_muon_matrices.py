"""What Muon takes for a matrix: experts of a stack, sections of each, 1x1 convolutions."""

import warnings

import pytest
import torch
from torch import nn

import blockopt
from blockopt.blocks import Blocks, Split, to_plain
from blockopt.optim.matrix_sections import is_hidden_matrix

MLP = ("mlp_gate", "mlp_in")


def muon(parameter, blocks, **options):
    group = {"params": [("w", parameter)], "blocks": [to_plain(blocks)]}
    return blockopt.BlockMuon([group], lr=0.1, **options)


def after_steps(start, blocks, gradients, scales=None):
    """A parameter after one step for each gradient."""
    parameter = nn.Parameter(start.clone())
    optimizer = muon(parameter, blocks)
    if scales is not None:
        optimizer.set_block_scales({"w": scales})
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [1, 2])
def test_each_expert_and_section_is_a_matrix_of_its_own(dim):
    """Gate and input, 6 and 6 neurons of 3 experts, along rows or columns; a scale per neuron."""
    shape = (3, 12, 5) if dim == 1 else (3, 5, 12)
    start, gradients = random(*shape), [random(*shape, seed=i) for i in (1, 2)]
    stacked = Blocks(MLP, split=Split(dim, (6, 6), (6, 6), stack=3))
    scales = random(36, seed=3).abs().float()
    together = after_steps(start, stacked, gradients, scales)
    for expert in range(3):
        for section, role in enumerate(MLP):
            cut = [x[expert].narrow(dim - 1, 6 * section, 6) for x in (start, *gradients)]
            own = scales.view(3, 2, 6)[expert, section]
            alone = Blocks((role,), split=Split(dim - 1, (6,), (6,)))
            expected = after_steps(cut[0], alone, cut[1:], own)
            found = together[expert].narrow(dim - 1, 6 * section, 6)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_more_experts_than_a_batch_holds(monkeypatch):
    start, gradients = random(7, 4, 6), [random(7, 4, 6, seed=1)]
    blocks = Blocks(("mlp_in",), split=Split(1, (4,), (1,), stack=7))
    expected = after_steps(start, blocks, gradients)
    monkeypatch.setattr("blockopt.optim.muon_step.CPU_BATCH", 30)
    torch.testing.assert_close(after_steps(start, blocks, gradients), expected)


def test_an_expert_without_tokens():
    """Its momentum decays as that of a parameter with a gradient of zeros; weight decay applies."""
    blocks = Blocks(("mlp_out",), split=Split(1, (4,), (1,), stack=3))
    parameter = nn.Parameter(random(3, 4, 6))
    start = parameter.detach().clone()
    optimizer = muon(parameter, blocks, momentum=0.9, weight_decay=0.1)
    parameter.grad = random(3, 4, 6, seed=1)
    parameter.grad[0] = 0  # never a token
    optimizer.step()
    torch.testing.assert_close(parameter[0].detach(), start[0] * (1 - 0.1 * 0.1))
    first = {name: value.clone() for name, value in optimizer.state[parameter].items()}
    moved = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    parameter.grad[2] = random(4, 6, seed=2)
    optimizer.step()
    momentum = first["momentum_buffer"][1]
    torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"][1], 0.9 * momentum)
    alone = nn.Parameter(moved[1].clone())
    blocks = Blocks(("mlp_out",), split=Split(0, (4,), (1,)))
    other = muon(alone, blocks, momentum=0.9, weight_decay=0.1)
    alone.grad = torch.zeros_like(alone)
    other._init_group(other.param_groups[0])
    other.state[alone]["momentum_buffer"].copy_(momentum)
    other.state[alone]["neuron_squares"].copy_(first["neuron_squares"].view(3, 6)[1])
    for name in ("input_sketch", "input_trace"):
        other.state[alone][name].copy_(first[name][1:2])
    other.step()
    torch.testing.assert_close(parameter[1].detach(), alone.detach())
    assert parameter.isfinite().all()
    torch.testing.assert_close(parameter[0].detach(), start[0] * (1 - 0.1 * 0.1) ** 2)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("dim", "heads"), [(0, 3), (1, 2)])
def test_a_1x1_convolution_is_a_matrix(dim, heads, memory_format):
    start, gradients = random(6, 4), [random(6, 4, seed=1)]
    blocks = Blocks(("query",), split=Split(dim, (start.shape[dim],), (heads,)))
    scales = torch.linspace(0.5, 2, heads)
    flat = after_steps(start, blocks, gradients, scales)
    images = [
        x[:, :, None, None].contiguous(memory_format=memory_format) for x in (start, *gradients)
    ]
    found = after_steps(images[0], blocks, images[1:], scales)
    torch.testing.assert_close(found[:, :, 0, 0], flat)


def test_a_vector_or_an_embedding_is_no_hidden_matrix():
    assert is_hidden_matrix(torch.empty(4, 3), Blocks(("mlp_in",)))
    assert not is_hidden_matrix(torch.empty(4, 1), Blocks(("mlp_in",)))
    assert not is_hidden_matrix(torch.empty(4), Blocks(("query",)))
    assert not is_hidden_matrix(torch.empty(4, 3), Blocks(("embedding",)))


def test_it_says_what_share_of_the_hidden_matrices_it_takes():
    known, unknown = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(4, 4))
    blocks = [to_plain(Blocks(("query",))), to_plain(Blocks(("other",)))]
    group = {"params": [("known", known), ("unknown", unknown)], "blocks": blocks}
    with pytest.warns(UserWarning, match=r"80% of the entries.*unknown\. .*example=batch"):
        optimizer = blockopt.BlockMuon([group])
    assert optimizer.muon_share == pytest.approx(0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert muon(known, Blocks(("query",))).muon_share == 1
