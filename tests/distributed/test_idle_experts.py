"""Parameters that some ranks do not use: an expert without tokens, a layer that nobody calls."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import blockopt
from blockopt.curvature import ESTIMATORS
from tests.helpers.optimizers import OPTIMIZERS
from tests.helpers.parallel_models import LENGTH, MLP, VOCAB, WIDTH, Attention
from tests.helpers.ranks import assert_close_by_name, assert_equal_on_ranks, run_on_two_ranks
from tests.helpers.ranks import whole as gathered

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
CASES = [
    *((name, None) for name in OPTIMIZERS),
    *(("adamw", curvature) for curvature in ESTIMATORS),
    ("muon", "newton"),
]


class Experts(nn.Module):
    """Two experts, one for each half of the vocabulary.

    Args:
        always: Whether an expert without tokens is called too, on none: FSDP2 needs that.
    """

    def __init__(self, always):
        super().__init__()
        self.experts, self.always = nn.ModuleList([MLP(), MLP()]), always

    def forward(self, x, tokens):
        for index, expert in enumerate(self.experts):
            chosen = tokens * 2 // VOCAB == index
            if self.always or chosen.any():
                x = x.index_put((chosen,), x[chosen] + expert(x[chosen]))
        return x


class Mixture(nn.Module):
    def __init__(self, always):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp = Experts(always)
        self.never_called = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        x = self.mlp(x + self.attention(self.norm1(x)), tokens)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), labels.flatten())


def mixture(always=False):
    torch.manual_seed(0)
    return Mixture(always).double()


def loss(model, step, rank=None):
    """Rank 0 has tokens for both experts, rank 1 for the first one only."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB // 2, (4, LENGTH + 1), generator=generator)
    tokens[:2] += VOCAB // 2 * torch.randint(2, (2, LENGTH + 1), generator=generator)
    tokens = tokens if rank is None else tokens[2 * rank : 2 * rank + 2]
    return model(tokens[:, :-1], tokens[:, 1:])


def trained(model, name, curvature, rank=None):
    warnings.simplefilter("ignore")
    optimizer = OPTIMIZERS[name](blockopt.param_groups(model))
    block_lr = None
    if curvature is not None:
        block_lr = blockopt.BlockLR(optimizer, model, curvature=curvature, every=1, by="tensor")
    slow = curvature is not None and ESTIMATORS[curvature].needs_slopes
    for step in range(28 if slow else 3):
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()
        if block_lr is not None:
            block_lr.step(partial(loss, model, 100 + step, rank))
    assert block_lr is None or (block_lr.history and not block_lr.failures)
    return {n.removeprefix("module."): gathered(p.detach()) for n, p in model.named_parameters()}


def replicas(expected, rank):
    for case in CASES:
        model = DistributedDataParallel(mixture(), find_unused_parameters=True)
        compare(trained(model, *case, rank), expected[case], case)


def shards(expected, rank):
    for case in CASES:
        if case[1] is None or ESTIMATORS[case[1]].works_sharded:
            model = mixture(always=True)
            fully_shard(model.mlp)
            compare(trained(fully_shard(model), *case, rank), expected[case], case)


def compare(found, expected, case):
    # "analytic" lacks cross terms between ranks where a layer mixes sequences, as experts do.
    tolerance = 1e-2 if case[1] == "analytic" else 1e-9
    assert_close_by_name(found, expected, case, tolerance)
    for value in found.values():
        assert_equal_on_ranks(value)


def test_two_ranks_of_which_one_leaves_an_expert_idle():
    """Training equals that of one process, and nobody waits."""
    torch.set_num_threads(1)
    expected = {case: trained(mixture(), *case) for case in CASES}
    run_on_two_ranks(partial(replicas, expected), partial(shards, expected))
