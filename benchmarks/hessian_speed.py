"""How fast the exact Hessians are, next to torch.func and curvlinops, and how their cost grows with length and width.

Five tables: dense closed form of an attention layer; factored trace, diagonal and Frobenius norm
against Hutchinson at 1 % standard error; the factored forms at the size of a layer of GPT-2 small;
products with vectors of a small GPT; growth of cost.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.lib.arms import (
    CONSOLE,
    add_outputs,
    check,
    machine_of_run,
    positive,
    progress_bar,
    save,
    show,
)
from benchmarks.lib.attention_case import ROLES, AttentionCase
from benchmarks.step_time import BUSY
from blockopt.analysis.closed_forms.growth import fit_exponent
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from blockopt.analysis.operators.model_operators import GaussNewtonOperator, HessianOperator
from recipes.common.gpt2 import GPT2, PRESETS, GPT2Config

SIZES = ((17, 16), (64, 16), (17, 32), (64, 32))  # length and width
DENSE_TARGET, FACTORED_TARGET, PRODUCT_TARGET, MEMORY_TARGET = 20.0, 100.0, 1.0, 4.0
PRECISION = 0.01  # relative standard error that Hutchinson's estimates have to reach
PILOT = 40  # probes from which the number that this takes is reckoned

Results = dict[str, Any]


def interleaved(
    arms: Mapping[str, Callable[[], Any]], rounds: int, title: str
) -> dict[str, list[float]]:
    """Seconds of each call, one a round, after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    with progress_bar(title, (rounds + 1) * len(arms)) as advance:
        for number in range(rounds + 1):
            names = list(arms)
            for name in (
                names[number % len(names) :] + names[: number % len(names)]
            ):  # an order that rotates
                call = arms[name]
                begin = time.perf_counter()
                call()
                elapsed = time.perf_counter() - begin
                if number:
                    times[name].append(elapsed)
                advance(name)
    return times


def ratio_of(times: Mapping[str, Sequence[float]], name: str, reference: str) -> float:
    """Median over the rounds of the ratio within a round."""
    return median(mine / other for mine, other in zip(times[name], times[reference]))


def dense(sizes: Sequence[tuple[int, int]], rounds: int) -> Results:
    """Closed form, torch.func and curvlinops, values compared; and what it takes to fill a fresh matrix of that size."""
    rows = []
    for length, width in sizes:
        case = AttentionCase(length, width)
        arms = {
            "closed form": lambda case=case: case.closed_form().dense(),
            "torch.func": case.by_torch,
            "curvlinops": case.by_curvlinops,
            "fill": lambda width=width: torch.ones(3 * width**2, 3 * width**2, dtype=torch.float64),
        }
        ours, exact, theirs, _ = (call() for call in arms.values())
        times = interleaved(arms, rounds, f"Dense, L = {length}, d = {width}")
        rows.append(
            {
                "length": length,
                "width": width,
                "milliseconds": {name: 1e3 * median(t) for name, t in times.items()},
                "faster": {
                    name: ratio_of(times, name, "closed form")
                    for name in ("torch.func", "curvlinops")
                },
                "difference": float((ours - exact).abs().max() / exact.abs().max()),
                "difference_of_peer": float((theirs - exact).abs().max() / exact.abs().max()),
            }
        )
    return {"rows": rows}


def factored(length: int, width: int, rounds: int) -> Results:
    """Trace, diagonal and Frobenius norm in closed form, against curvlinops.

    Trace and norm by Hutchinson: `n` probes have the standard error of one over √n; the number for
    1 % is reckoned from the spread of single probes, and its time from that of a product. The
    diagonal would take more probes than the block has columns, so that for all three the whole
    block, `H @ I`, is cheaper, and exact.
    """
    from curvlinops import hutchinson_squared_fro, hutchinson_trace

    case = AttentionCase(length, width)

    def ours() -> list[tuple[float, Tensor, float]]:
        hessian = case.closed_form()
        blocks = [hessian.factored(role) for role in ROLES]
        return [
            (float(block.trace()), block.diagonal(), float(block.squared_frobenius()))
            for block in blocks
        ]

    found = {}
    for number, role in enumerate(ROLES):
        exact, operator = ours()[number], case.curvlinops(role)
        torch.manual_seed(0)
        traces, squares = (
            [float(f(operator, num_matvecs=1)) for _ in range(PILOT)]
            for f in (hutchinson_trace, hutchinson_squared_fro)
        )
        begin = time.perf_counter()
        hutchinson_squared_fro(operator, num_matvecs=PILOT)
        seconds = (time.perf_counter() - begin) / PILOT
        # One product serves both; the error of a norm is half of that of its square.
        needed = {
            "trace": math.ceil((stdev(traces) / (PRECISION * abs(exact[0]))) ** 2),
            "norm": math.ceil((stdev(squares) / (2 * PRECISION * exact[2])) ** 2),
        }
        begin = time.perf_counter()
        identity = torch.eye(operator.shape[1], dtype=torch.float64)
        matrix = torch.cat([operator @ columns for columns in identity.split(32, 1)], 1)
        whole = matrix.trace(), matrix.diagonal(), matrix.square().sum()
        found[role] = {
            "exact": {"trace": exact[0], "norm": math.sqrt(exact[2])},
            "products": needed,
            "seconds": max(needed.values()) * seconds,
            "seconds_of_whole_matrix": time.perf_counter() - begin,
            "difference": float((whole[1] - exact[1]).abs().max() / exact[1].abs().max()),
        }
    times = interleaved({"closed form": ours}, rounds, "Factored")
    mine = median(times["closed form"])
    return {
        "length": length,
        "width": width,
        "seconds": mine,
        "curvlinops": found,
        "faster": sum(p["seconds_of_whole_matrix"] for p in found.values()) / mine,
        "faster_without_diagonal": sum(p["seconds"] for p in found.values()) / mine,
    }


def gpt2_small(length: int, width: int, heads: int) -> Results:
    """Time of each quantity for every head of a layer, in float32, and the largest memory of the process."""
    torch.manual_seed(0)
    key_width = width // heads
    X, Y = torch.randn(2, 1, length, width)
    query, key, value = (torch.randn(heads, width, key_width) / math.sqrt(width) for _ in range(3))
    output = torch.randn(heads, key_width, width) / math.sqrt(width)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    begin = time.perf_counter()
    hessian = SelfAttentionHessian(X, query, key, value, Y, W_U=output, mask=mask)
    seconds: dict[str, float] = {"forward": time.perf_counter() - begin}
    with progress_bar("GPT-2 small", heads * len(hessian.roles)) as advance:
        for role in hessian.roles:
            seconds |= {f"{role} {what}": 0.0 for what in ("trace and diagonal", "Frobenius norm")}
            for head in range(heads):
                begin = time.perf_counter()
                block = hessian.factored(role, head)
                block.trace(), block.diagonal()
                middle = time.perf_counter()
                block.squared_frobenius()
                seconds[f"{role} trace and diagonal"] += middle - begin
                seconds[f"{role} Frobenius norm"] += time.perf_counter() - middle
                advance(f"{role}, head {head}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    dense_bytes = (width * key_width) ** 2 * X.element_size()
    return {"seconds": seconds, "gib": peak, "gib_before": before, "dense_gib": dense_bytes / 2**30}


def products(config: GPT2Config, batch: int, rounds: int) -> Results:
    """One product of the Hessian and of the Gauss-Newton matrix of a GPT with a vector."""
    from curvlinops import GGNLinearOperator, HessianLinearOperator

    torch.manual_seed(0)
    model = GPT2(config).eval()
    tokens, targets = torch.randint(config.vocab_size, (2, batch, config.context))

    class Flat(nn.Module):
        """The logits of every token in one dimension, as curvlinops wants them for nn.CrossEntropyLoss."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens).flatten(0, 1)

    number = targets.numel()
    options = {"check_deterministic": False, "num_data": number, "batch_size_fn": lambda _: number}
    data = [(tokens, targets.flatten())]
    v = torch.randn(sum(p.numel() for p in model.parameters()))
    with sdpa_kernel(SDPBackend.MATH):
        theirs = {
            "Hessian": HessianLinearOperator(
                Flat(), nn.CrossEntropyLoss(), list(model.parameters()), data, **options
            ),
            "Gauss-Newton": GGNLinearOperator(
                Flat(), nn.CrossEntropyLoss(), list(model.parameters()), data, **options
            ),
        }
        ours = {"Hessian": HessianOperator, "Gauss-Newton": GaussNewtonOperator}
        ours = {
            name: cls(model, lambda: model(tokens, targets), check_deterministic=False)
            for name, cls in ours.items()
        }
        arms = {f"{name}, blockopt": lambda A=A: A @ v for name, A in ours.items()}
        arms |= {f"{name}, curvlinops": lambda A=A: A @ v for name, A in theirs.items()}
        difference = {
            name: float((ours[name] @ v - theirs[name] @ v).norm() / (theirs[name] @ v).norm())
            for name in ours
        }
        times = interleaved(arms, rounds, "Products")
        kept = HessianOperator(model, lambda: model(tokens, targets), check_deterministic=False)
        with kept.keep_graph():
            again = interleaved(
                {"kept": lambda: kept @ v, "curvlinops": arms["Hessian, curvlinops"]},
                rounds,
                "Products, graph kept",
            )
    return {
        "parameters": len(v),
        "milliseconds": {name: 1e3 * median(t) for name, t in times.items()}
        | {"Hessian, graph kept": 1e3 * median(again["kept"])},
        "ratio": {
            name: ratio_of(times, f"{name}, blockopt", f"{name}, curvlinops") for name in ours
        }
        | {"Hessian, graph kept": ratio_of(again, "kept", "curvlinops")},
        "difference": difference,
    }


def cost_growth(lengths: Sequence[int], widths: Sequence[int], rounds: int) -> Results:
    """Seconds of trace, diagonal and Frobenius norm of each block, against length at one width and width at one length."""
    series: dict[str, dict[str, list[float]]] = {}
    for what, sizes in (
        ("length", [(n, widths[0]) for n in lengths]),
        ("width", [(lengths[0], n) for n in widths]),
    ):
        series[what] = {role: [] for role in ROLES}
        for length, width in sizes:
            torch.manual_seed(0)
            X, Y = torch.randn(2, 1, length, width)
            weights = [torch.randn(width, width) / math.sqrt(width) for _ in ROLES]
            hessian = SelfAttentionHessian(X, *weights, Y)

            def run(role: str, hessian: SelfAttentionHessian = hessian) -> None:
                block = hessian.factored(role)
                block.trace(), block.diagonal(), block.squared_frobenius()

            times = interleaved(
                {role: lambda role=role: run(role) for role in ROLES}, rounds, f"Growth, {what}"
            )
            for role in ROLES:
                series[what][role].append(min(times[role]))
    at = {"length": list(lengths), "width": list(widths)}
    slopes = {
        what: {
            role: fit_exponent(
                torch.tensor(at[what][-3:]).double(), torch.tensor(t[-3:]).double()
            ).value
            for role, t in roles.items()
        }
        for what, roles in series.items()
    }
    return {"at": at, "seconds": series, "slopes_of_last_three": slopes}


def plot(path: Path, growth: Results) -> None:
    """Cost against length and width, log-log, with the slopes of the theory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    # Leading terms: C_i takes L² d², E_i = C_iᵀ Λ C_i takes L d³, for keys inner products of d by d
    # matrices L² d², of T_i L³.
    expected = {
        "length": {"query": 2, "key": 3, "value": 2},
        "width": {"query": 3, "key": 3, "value": 2},
    }
    for axis, what in zip(axes, ("length", "width")):
        for role, colour in zip(ROLES, ("tab:blue", "tab:orange", "tab:green")):
            at, seconds = growth["at"][what], growth["seconds"][what][role]
            slope, theory = growth["slopes_of_last_three"][what][role], expected[what][role]
            axis.loglog(
                at,
                seconds,
                "o-",
                color=colour,
                label=f"{role}: last slope {slope:.1f}, theory at most {theory}",
            )
            axis.loglog(
                at,
                [seconds[-1] * (n / at[-1]) ** theory for n in at],
                "--",
                color=colour,
                alpha=0.5,
            )
        axis.set_xlabel({"length": "length of the sequence L", "width": "width d = dk"}[what])
        axis.set_xticks(at, [str(n) for n in at])
        axis.minorticks_off()
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds, trace + diagonal + Frobenius")
    figure.suptitle("Cost of the factored blocks of one head")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    CONSOLE.print(f"Wrote {path}")


def met(value: float, target: float, at_least: bool) -> str:
    """Whether a target is met, for a table."""
    return "[green]yes" if (value >= target if at_least else value <= target) else "[red]no"


def tables(results: Results, machine: dict[str, Any]) -> None:
    """Print what was measured."""
    show(
        f"Dense Hessian of one attention layer, float64: how many times faster (target {DENSE_TARGET:g})",
        ["L, d", "closed ms", "torch.ones ms", "torch.func", "curvlinops", "difference", "met?"],
        [
            [
                f"{row['length']}, {row['width']}",
                f"{row['milliseconds']['closed form']:.2f}",
                f"{row['milliseconds']['fill']:.2f}",
                f"{row['faster']['torch.func']:.1f}",
                f"{row['faster']['curvlinops']:.1f}",
                f"{row['difference']:.0e}",
                met(min(row["faster"].values()), DENSE_TARGET, True),
            ]
            for row in results["dense"]["rows"]
        ],
        machine,
    )
    one = results["factored"]
    show(
        f"Factored, L = {one['length']}, d = {one['width']}: {1e3 * one['seconds']:.0f} ms. Times slower: H @ I "
        f"{one['faster']:.0f}, Hutchinson without diagonal {one['faster_without_diagonal']:.0f} (target {FACTORED_TARGET:g})",
        ["block", "trace", "norm", "H @ I, s", "products at 1 %", "Hutchinson, s"],
        [
            [
                role,
                f"{p['exact']['trace']:.4g}",
                f"{p['exact']['norm']:.4g}",
                f"{p['seconds_of_whole_matrix']:.2f}",
                f"{p['products']['trace']}, {p['products']['norm']}",
                f"{p['seconds']:.2f}",
            ]
            for role, p in one["curvlinops"].items()
        ],
        machine,
    )
    layer = results["gpt2_small"]
    show(
        f"A layer of GPT-2 small, all heads, float32: peak {layer['gib']:.1f} GiB (target {MEMORY_TARGET:g}); "
        f"one head's block, dense, {layer['dense_gib']:.0f} GiB",
        ["quantity", "seconds"],
        [[name, f"{seconds:.2f}"] for name, seconds in layer["seconds"].items()],
        machine,
    )
    gpt = results["products"]
    show(
        f"Products with a vector, GPT of {gpt['parameters'] / 1e6:.1f}M parameters: time over that of curvlinops",
        ["operator", "ratio", "target", "met?"],
        [
            [name, f"{r:.2f}", f"<= {PRODUCT_TARGET:g}", met(r, PRODUCT_TARGET, False)]
            for name, r in gpt["ratio"].items()
        ],
        machine,
    )


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=7,
        help="rounds of the dense forms and the products (default: 7)",
    )
    parser.add_argument("--threads", type=positive, default=1, help="threads of torch (default: 1)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, in seconds, to see that it works"
    )
    add_outputs(parser, "hessian_speed")
    arguments = parser.parse_args()
    check(parser, arguments, ["curvlinops", "matplotlib"])
    quick, rounds = arguments.quick, 2 if arguments.quick else arguments.rounds
    results: Results = {}
    with machine_of_run() as machine:
        results["gpt2_small"] = gpt2_small(
            *((64, 32, 4) if quick else (1024, 768, 12))
        )  # first: it is about peak memory
        results["dense"] = dense(SIZES[:1] if quick else SIZES, rounds)
        results["factored"] = factored(*((17, 8) if quick else (64, 64)), rounds)
        results["products"] = products(PRESETS["0.5M"], 2 if quick else 8, rounds)
        sizes = (
            ((16, 32, 64), (8, 16, 32))
            if quick
            else ((64, 128, 256, 512, 1024), (32, 64, 128, 256, 512))
        )
        results["growth"] = cost_growth(*sizes, 1 if quick else 3)
    tables(results, machine)
    if machine["waiting"] is not None and machine["waiting"] > BUSY:
        CONSOLE.print(
            "[red]Other processes wanted the cores during this run: do not trust its times."
        )
    save(arguments.output, {"machine": machine, **results})
    plot(arguments.plot, results["growth"])


if __name__ == "__main__":
    main()
