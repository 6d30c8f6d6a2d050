"""FSDP2 as people use it: Conv1D, tied and frozen weights, accumulation, clipping, compiled."""

import warnings
from functools import cache

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import blockopt
from tests.helpers.optimizers import OPTIMIZERS, random_scales
from tests.helpers.ranks import assert_close_by_name, run_on_two_ranks
from tests.helpers.ranks import whole as gathered

MICRO_BATCHES, STEPS = 2, 3


def gpt2():
    """Heads, neurons and tokens that two ranks do not divide."""
    import transformers

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 12, "n_head": 3, "n_positions": 8, "vocab_size": 19}
    without_noise = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_inner=17, **sizes, **without_noise, **tokens)
    model = transformers.GPT2LMHeadModel(config).double()
    model.transformer.h[0].ln_1.weight.requires_grad_(False)
    return model


def sharded(reshard):
    model = gpt2()
    for layer in model.transformer.h:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)


def loss(model, seed, rank):
    ids = torch.randint(19, (4, 8), generator=torch.Generator().manual_seed(seed))
    ids = ids if rank is None else ids[2 * rank : 2 * rank + 2]
    return model(input_ids=ids, labels=ids).loss


def trained(model, name, curvature=None, rank=None, compiled=False):
    optimizer = OPTIMIZERS[name](blockopt.param_groups(model))
    optimizer.set_block_scales(random_scales(optimizer))
    block_lr = None
    if curvature is not None:
        block_lr = blockopt.BlockLR(optimizer, model, curvature=curvature, every=1, by="tensor")
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            if rank is not None:
                model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            (loss(run, MICRO_BATCHES * step + micro, rank) / MICRO_BATCHES).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert gathered(norm) > 0.1
        optimizer.step()
        if block_lr is not None:
            block_lr.step(lambda step=step: loss(run, 100 + step, rank))
    assert block_lr is None or (block_lr.history and not block_lr.failures)
    return {n: gathered(p.detach()) for n, p in model.named_parameters()}


@cache
def on_one_process(name, curvature):
    return trained(gpt2(), name, curvature)


def equal_one_process(rank):
    warnings.simplefilter("ignore")
    cases = [
        *((name, None, False) for name in OPTIMIZERS),
        *(("adamw", "newton", compiled) for compiled in (False, True)),
        *(("sgd", "gauss_newton", compiled) for compiled in (False, True)),
        ("muon", "newton", False),
        *((name, None, True) for name in ("adamw-block", "muon")),
    ]
    for name, curvature, compiled in cases:
        for reshard in (True,) if compiled else (True, False):
            found = trained(sharded(reshard), name, curvature, rank, compiled)
            # Scales from curvature are float32.
            tolerance = 1e-9 if curvature is None else 1e-7
            what = f"{name}, {curvature}, compiled={compiled}, reshard={reshard}"
            assert_close_by_name(found, on_one_process(name, curvature), what, tolerance)


@pytest.mark.distributed
def test_two_ranks_train_a_model_of_transformers_as_one():
    run_on_two_ranks(equal_one_process)
