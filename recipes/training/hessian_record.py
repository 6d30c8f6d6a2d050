"""`train.py --record-hessian`: the curvature of the weights at chosen steps of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from blockopt.analysis import Probes, hessian_report
from blockopt.analysis.model_report import HessianReport
from blockopt.analysis.recorder import HessianRecorder
from blockopt.blocks import find_blocks
from blockopt.files import whole_file
from blockopt.measure.closures import Losses
from recipes.common.training import token_loss

ROLES = {"query", "key", "value", "output", "mlp_in", "mlp_gate", "mlp_out"}
SEQUENCES = 2  # of the batch that is measured, the same at every step
PROBES = Probes(top=0, num_probes=4, num_steps=10, num_starts=1)  # 14 products per block


def measure(model: nn.Module, losses: Losses) -> HessianReport:
    """Measure the Hessian of each head and of each MLP matrix with few probes."""
    found = find_blocks(model, per_row=())
    names = [name for name, blocks in found.items() if set(blocks.roles) <= ROLES]
    only = [name for name in names if model.get_parameter(name).ndim > 1]
    return hessian_report(model, losses, by="head", only=only, blocks=found, probes=PROBES)


def hessian_recorder(run: Any) -> Callable[[int], None]:
    """Return what to call after each step: it measures at the steps of `--record-hessian`.

    Each time it writes `hessian.json`, from which a resumed run goes on, and `hessian.png`.

    Args:
        run: The `Run` of `train.py`.
    """
    if not run.arguments.record_hessian:
        return lambda step: None
    batches = run.batches if run.held_out is None else run.held_out
    inputs, targets = (part[:SEQUENCES].to(run.accelerator.device) for part in batches[0])
    loss = functools.partial(token_loss, run.plain, inputs, targets)
    folder, steps = run.arguments.output, run.arguments.record_hessian
    path = folder / "hessian.json"
    recorder = HessianRecorder(run.plain, loss, steps, measure=measure, path=path)

    def record(step: int) -> None:
        if step in steps:
            run.accelerator.print(f"Measuring the Hessian after step {step}", flush=True)
        if recorder.step(step):
            with whole_file(folder / "hessian.png") as file:
                recorder.plot().savefig(file, format="png", dpi=120)

    return record
