"""Optimizers on processes that share a sharded GPT-2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from benchmarks.lib.timing import time_in_rounds
from blockopt import BlockAdamW, BlockMuon, param_groups
from blockopt.blocks import from_plain
from blockopt.optim.matrix_sections import is_hidden_matrix
from recipes.common.gpt2 import GPT2, PRESETS

LR = 1e-4
LOCAL = "127.0.0.1"


def measure_on_ranks(ranks: int, size: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Return times, traffic and state of all arms on so many processes of one thread each."""
    store = dist.TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
    output = folder / f"{ranks}.pt"
    mp.spawn(_start, args=(ranks, store.port, size, rounds, str(output)), nprocs=ranks, join=True)
    found: dict[str, Any] = torch.load(output)
    return found


def _start(rank: int, ranks: int, port: int, size: str, rounds: int, output: str) -> None:
    os.environ.update(MASTER_ADDR=LOCAL, MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = _measure(size, rounds)
    if rank == 0:
        torch.save(results, output)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo may abort a process that takes down its statics


def _measure(size: str, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT2(PRESETS[size])
    for block in model.h:
        fully_shard(block)
    fully_shard(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter).mul_(1e-3)
    arms = {
        "AdamW": torch.optim.AdamW(model.parameters(), lr=LR, foreach=True),
        "torch Muon": torch.optim.Muon(_matrices(model), lr=LR, adjust_lr_fn="match_rms_adamw"),
        "BlockAdamW": BlockAdamW(param_groups(model), lr=LR),
        "BlockMuon": BlockMuon(_matrix_groups(model), lr=LR),
    }
    results: dict[str, Any] = {}
    for name, optimizer in arms.items():
        optimizer.step()
        before = _received_bytes()
        optimizer.step()
        dist.barrier()
        traffic = (_received_bytes() - before) / dist.get_world_size()
        results[name] = {"received_bytes": traffic, "state_bytes": _state_bytes(optimizer)}
    times = time_in_rounds({n: arm.step for n, arm in arms.items()}, rounds, "Steps", warm_up=0)
    for name in arms:
        results[name]["seconds"] = times.seconds[name]
    results["BlockMuon"]["ratio"] = times.ratio("BlockMuon", "torch Muon")
    results["BlockAdamW"]["ratio"] = times.ratio("BlockAdamW", "AdamW")
    return results


def _matrix_groups(model: nn.Module) -> list[dict[str, Any]]:
    groups = []
    for group in param_groups(model):
        chosen = [
            (named, blocks)
            for named, blocks in zip(group["params"], group["blocks"])
            if is_hidden_matrix(named[1], from_plain(blocks))
        ]
        if chosen:
            params, blocks = map(list, zip(*chosen))
            groups.append({**group, "params": params, "blocks": blocks})
    return groups


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for group in _matrix_groups(model) for _, parameter in group["params"]]


def _state_bytes(optimizer: Optimizer) -> int:
    values = [v for state in optimizer.state.values() for v in state.values()]
    parts = [v.to_local() if hasattr(v, "to_local") else v for v in values]
    return sum(p.numel() * p.element_size() for p in parts if isinstance(p, torch.Tensor))


def _received_bytes() -> int:
    """Return the bytes that all processes of this machine have received from one another."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    return 0
