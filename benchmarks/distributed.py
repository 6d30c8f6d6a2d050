"""Measure sharded steps on 1, 2 and 4 processes, and tell what 7B and 70B cost on a cluster."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.lib.options import Parser, positive
from benchmarks.lib.output import quartiles, save, show, warn_if_busy
from benchmarks.lib.ranks import measure_on_ranks
from benchmarks.lib.scaling import LLAMAS, per_gpu
from benchmarks.lib.timing import conditions

GPUS = (8, 64, 256, 1024)
MB, GB = 1e6, 1e9


def measured_rows(measured: dict[int, dict[str, Any]]) -> list[list[str]]:
    """Return a row per number of processes and optimizer."""
    return [
        [
            f"{ranks}, {name}",
            f"{1e3 * median(result['seconds']):.0f}",
            quartiles(result["ratio"]) if "ratio" in result else "",
            f"{result['received_bytes'] / MB:.1f}",
            f"{result['state_bytes'] / MB:.1f}",
        ]
        for ranks, results in measured.items()
        for name, result in results.items()
    ]


def computed_rows(computed: dict[str, dict[int, dict[str, float]]]) -> list[list[str]]:
    """Return a row per model and number of GPUs."""
    return [
        [
            f"{model}, {gpus}",
            f"{cost['state_bytes'] / GB:.2f}",
            f"{cost['received_undivided'] / GB:.1f}",
            f"{cost['received'] / GB:.3f}",
            f"{cost['received_vectors'] / GB:.3f}",
            f"{cost['flops_undivided']:.1e}",
            f"{cost['flops']:.1e}",
        ]
        for model, by_gpus in computed.items()
        for gpus, cost in by_gpus.items()
    ]


def plot(path: Path, computed: dict[str, dict[int, dict[str, float]]]) -> None:
    """Draw traffic and work of each GPU against their number."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axis, key, label in zip(axes, ("received", "flops"), ("bytes received", "FLOP")):
        for model, by_gpus in computed.items():
            for suffix, style in (("", "-o"), ("_undivided", "--")):
                values = [by_gpus[gpus][key + suffix] for gpus in GPUS]
                name = f"{model}, {'undivided' if suffix else 'divided'}"
                axis.loglog(GPUS, values, style, label=name)
        axis.set(xlabel="GPUs", title=f"{label} per GPU and step")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """Measure, compute, print, save."""
    parser = Parser("distributed", __doc__, threads=1)
    parser.add_preset("--size", "10M", "preset of recipes/common/gpt2.py")
    parser.add_argument("--rounds", type=positive, default=5, help="rounds of all optimizers")
    parser.add_argument(
        "--processes", type=positive, nargs="+", default=[1, 2, 4], help="numbers of processes"
    )
    arguments = parser.parse()
    if arguments.quick:
        arguments.size, arguments.rounds, arguments.processes = "0.5M", 1, [2]
    with tempfile.TemporaryDirectory() as folder, conditions() as run:
        measured = {
            ranks: measure_on_ranks(ranks, arguments.size, arguments.rounds, Path(folder))
            for ranks in arguments.processes
        }
    columns = ["processes, arm", "ms", "vs torch (quartiles)", "MB received", "MB of state"]
    show(f"Sharded steps, {arguments.size}, per rank", columns, measured_rows(measured), run)
    warn_if_busy(run)
    computed = {model: {gpus: per_gpu(model, gpus) for gpus in GPUS} for model in LLAMAS}
    columns = ["model, GPUs", "GB of state", "GB undivided", "GB", "GB of vectors"]
    columns += ["FLOP undivided", "FLOP"]
    show("BlockMuon, per GPU and step, by formula", columns, computed_rows(computed), run)
    save(arguments.output, {"conditions": run, "measured": measured, "computed": computed})
    plot(arguments.plot, computed)


if __name__ == "__main__":
    main()
