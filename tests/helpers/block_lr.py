"""A small GPT with a BlockLR."""

import torch

import blockopt
from blockopt.block_lr import BlockLR
from blockopt.blocks.split import block_numel
from tests.helpers.optimizers import OPTIMIZERS, tiny_gpt, token_loss

GPT_ROLES = [
    *("embedding", "position", "query", "key", "value", "output"),
    *("mlp_in", "mlp_out", "norm", "bias"),
]
# Scales inside the step, and scales that multiply the learning rates of groups
BUILD = {
    "block": lambda model: blockopt.BlockAdamW(blockopt.param_groups(model), lr=1e-2),
    "torch": lambda model: torch.optim.AdamW(blockopt.param_groups(model, by="parameter"), lr=1e-2),
}


def attached(curvature="gauss_newton", optimizer="adamw", **options):
    model = tiny_gpt()
    optimizer = OPTIMIZERS[optimizer](blockopt.param_groups(model))
    return model, optimizer, BlockLR(optimizer, model, curvature=curvature, **options)


def take_step(model, optimizer, seed=0):
    optimizer.zero_grad()
    token_loss(model, seed).backward()
    optimizer.step()


def constant(model, **by_role):
    """A curvature function that gives each role a fixed curvature."""
    found = blockopt.find_blocks(model)
    values = {
        name: torch.tensor([by_role.get(role, 1.0) for role in entry.block_roles])
        for name, entry in found.items()
    }
    return lambda model, losses: values


def weighted_mean_log(model, scales):
    blocks = blockopt.find_blocks(model)
    numel = {
        name: block_numel(tuple(p.shape), blocks[name].split)
        for name, p in model.named_parameters()
    }
    total = sum(int(n.sum()) for n in numel.values())
    return (
        sum(float((numel[name] * scale.double().log()).sum()) for name, scale in scales.items())
        / total
    )
