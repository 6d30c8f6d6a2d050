"""Measure how fast the exact Hessians are, next to torch.func and curvlinops.

Four tables and a chart: the dense closed form of an attention layer; its factored trace, diagonal
and Frobenius norm; these for a layer of GPT-2 small; products with vectors of a small GPT; and how
the cost of the factored forms grows with length and width.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence
from functools import partial
from statistics import stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.lib.attention_case import ROLES, AttentionCase
from benchmarks.lib.cost_growth import cost_growth, plot_cost_growth
from benchmarks.lib.exact_curvature import TINY
from benchmarks.lib.options import Parser, positive
from benchmarks.lib.output import at_most, progress_bar, save, show, verdict, warn_if_busy
from benchmarks.lib.timing import conditions, time_in_rounds, timed
from blockopt.analysis import GaussNewtonOperator, HessianOperator, SelfAttentionHessian
from recipes.common.gpt2 import GPT2, PRESETS, GPT2Config

Results = dict[str, Any]
# How many times faster than the others the dense form should be, by length and width
SIZES = {(17, 16): 8.0, (64, 16): 20.0, (17, 32): 10.0, (64, 32): 20.0}
FACTORED_TARGET, PRODUCT_TARGET, MEMORY_TARGET = 100.0, 1.0, 4.0
# The largest acceptable seconds of the key blocks of a layer of GPT-2 small, and of short sequences
KEY_TARGETS = {"key trace": 2.0, "key trace and diagonal": 15.0, "key Frobenius norm": 60.0}
SHORT_TARGET = 1.0
COLUMNS = 8  # vectors of a product with several at once
PRECISION = 0.01  # relative standard error that Hutchinson's estimates have to reach
PILOT = 40  # probes from which the number that this takes is estimated


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors, over the largest entry of the second."""
    return float((a - b).abs().max() / b.abs().max())


def dense(sizes: Sequence[tuple[int, int]], rounds: int) -> list[Results]:
    """Time the closed form, torch.func, curvlinops, and filling a fresh matrix of that size."""
    rows = []
    for length, width in sizes:
        case = AttentionCase(length, width)
        calls = {
            "closed form": lambda case=case: case.closed_form().dense(),
            "torch.func": case.by_torch,
            "curvlinops": case.by_curvlinops,
            "fill": partial(torch.ones, 3 * width**2, 3 * width**2, dtype=torch.float64),
        }
        ours, exact, theirs, _ = (call() for call in calls.values())
        times = time_in_rounds(calls, rounds, f"Dense, L = {length}, d = {width}")
        peers = ("torch.func", "curvlinops")
        rows.append(
            {
                "length": length,
                "width": width,
                "target": SIZES[length, width],
                "milliseconds": {name: times.milliseconds(name) for name in calls},
                "faster": {name: times.ratio(name, "closed form")["median"] for name in peers},
                "difference": difference(ours, exact),
                "difference_of_peer": difference(theirs, exact),
            }
        )
    return rows


def factored(length: int, width: int, rounds: int) -> Results:
    """Time trace, diagonal and Frobenius norm in closed form and with curvlinops.

    With curvlinops trace and norm come from Hutchinson's estimates: `n` probes have the standard
    error of one over √n, so the spread of single probes gives the number for 1 %. The diagonal
    would take more probes than the block has columns. For all three together the whole block,
    `H @ I`, is therefore cheaper, and exact.
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
    for role, (trace, diagonal, square) in zip(ROLES, ours()):
        operator = case.curvlinops(role)
        identity = torch.eye(operator.shape[1], dtype=torch.float64)

        def whole(operator: Any = operator, identity: Tensor = identity) -> Tensor:
            return torch.cat([operator @ columns for columns in identity.split(32, 1)], 1)

        torch.manual_seed(0)
        traces, squares = (
            [float(estimate(operator, num_matvecs=1)) for _ in range(PILOT)]
            for estimate in (hutchinson_trace, hutchinson_squared_fro)
        )
        _, seconds = timed(partial(hutchinson_squared_fro, operator, num_matvecs=PILOT))
        # One product serves both; the error of a norm is half of that of its square.
        needed = {
            "trace": math.ceil((stdev(traces) / (PRECISION * abs(trace))) ** 2),
            "norm": math.ceil((stdev(squares) / (2 * PRECISION * square)) ** 2),
        }
        matrix, seconds_of_whole_matrix = timed(whole)
        found[role] = {
            "exact": {"trace": trace, "norm": math.sqrt(square)},
            "products": needed,
            "seconds": max(needed.values()) * seconds / PILOT,
            "seconds_of_whole_matrix": seconds_of_whole_matrix,
            "difference": difference(diagonal, matrix.diagonal()),
        }
    mine = time_in_rounds({"ours": ours}, rounds, "Factored").milliseconds("ours") / 1e3
    return {
        "length": length,
        "width": width,
        "seconds": mine,
        "curvlinops": found,
        "faster": sum(p["seconds_of_whole_matrix"] for p in found.values()) / mine,
        "faster_without_diagonal": sum(p["seconds"] for p in found.values()) / mine,
    }


def gpt2_small(length: int, width: int, heads: int) -> Results:
    """Time each quantity for every head of a layer in float32, and read the peak memory."""
    torch.manual_seed(0)
    key_width = width // heads
    X, Y = torch.randn(2, 1, length, width)
    query, key, value = (torch.randn(heads, width, key_width) / math.sqrt(width) for _ in range(3))
    output = torch.randn(heads, key_width, width) / math.sqrt(width)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    make = partial(SelfAttentionHessian, X, query, key, value, Y, W_U=output, mask=mask)
    hessian, seconds_of_forward = timed(make)
    seconds = {"forward": seconds_of_forward}
    with progress_bar("GPT-2 small", heads * len(hessian.roles)) as advance:
        for role in hessian.roles:
            diagonal, norm = f"{role} trace and diagonal", f"{role} Frobenius norm"
            trace = f"{role} trace"
            seconds |= {trace: 0.0, diagonal: 0.0, norm: 0.0}
            for head in range(heads):
                seconds[trace] += timed(lambda r=role, h=head: hessian.factored(r, h).trace())[1]
                block, made = timed(partial(hessian.factored, role, head))
                seconds[diagonal] += made + timed(lambda b=block: (b.trace(), b.diagonal()))[1]
                seconds[norm] += timed(block.squared_frobenius)[1]
                advance(f"{role}, head {head}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    dense_bytes = (width * key_width) ** 2 * X.element_size()
    return {"seconds": seconds, "gib": peak, "gib_before": before, "dense_gib": dense_bytes / 2**30}


def short_sequences(length: int, width: int, batch: int, rounds: int) -> Results:
    """Time the norm of the key block of many short sequences in float32."""
    torch.manual_seed(0)
    X, Y = torch.randn(2, batch, length, width)
    weights = [torch.randn(width, width) / math.sqrt(width) for _ in ROLES]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    hessian = SelfAttentionHessian(X, *weights, Y, mask=mask)
    calls = {"key": lambda: hessian.factored("key").frobenius()}
    seconds = time_in_rounds(calls, rounds, "Short sequences").milliseconds("key") / 1e3
    return {"length": length, "width": width, "sequences": batch, "seconds": seconds}


class FlatLogits(nn.Module):
    """The logits of all tokens in one dimension, as curvlinops wants them for cross-entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (all tokens, classes)."""
        return self.model(tokens).flatten(0, 1)


def products(config: GPT2Config, batch: int, rounds: int) -> Results:
    """Time products of the Hessian and the Gauss-Newton matrix of a GPT with 1 and 8 vectors."""
    from curvlinops import GGNLinearOperator, HessianLinearOperator

    torch.manual_seed(0)
    model = GPT2(config).eval()
    tokens, targets = torch.randint(config.vocab_size, (2, batch, config.context))
    v = torch.randn(sum(p.numel() for p in model.parameters()))
    number = targets.numel()
    options = {"check_deterministic": False, "num_data": number, "batch_size_fn": lambda _: number}
    data = [(tokens, targets.flatten())]
    arguments = (FlatLogits(model), nn.CrossEntropyLoss(), list(model.parameters()), data)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = {
            "Hessian": HessianLinearOperator(*arguments, **options),
            "Gauss-Newton": GGNLinearOperator(*arguments, **options),
        }
        ours = {
            name: kind(model, lambda: model(tokens, targets), check_deterministic=False)
            for name, kind in (
                ("Hessian", HessianOperator),
                ("Gauss-Newton", GaussNewtonOperator),
                ("Hessian, graph kept", HessianOperator),
            )
        }
        calls = {name: partial(A.__matmul__, v) for name, A in ours.items()}
        calls |= {f"{name}, curvlinops": partial(A.__matmul__, v) for name, A in theirs.items()}
        several = torch.randn(len(v), COLUMNS)
        for name, A in theirs.items():
            calls[f"{name} of {COLUMNS}"] = partial(ours[name].__matmul__, several)
            calls[f"{name} of {COLUMNS}, curvlinops"] = partial(A.__matmul__, several)
        found = {name: ((ours[name] @ v), (A @ v)) for name, A in theirs.items()}
        with ours["Hessian, graph kept"].keep_graph():
            times = time_in_rounds(calls, rounds, "Products")
    mine = [name for name in calls if not name.endswith("curvlinops")]
    peers = {name: f"{name.partition(',')[0]}, curvlinops" for name in mine}
    return {
        "parameters": len(v),
        "milliseconds": {name: times.milliseconds(name) for name in calls},
        "ratio": {name: times.ratio(name, peer)["median"] for name, peer in peers.items()},
        "difference": {name: float((a - b).norm() / b.norm()) for name, (a, b) in found.items()},
    }


def tables(results: Results, run: Results) -> None:
    """Print what was measured."""
    rows = []
    for row in results["dense"]:
        ms, faster = row["milliseconds"], row["faster"]
        rows.append(
            [
                *(f"{row['length']}, {row['width']}", f"{ms['closed form']:.2f}"),
                *(f"{ms['fill']:.2f}", f"{faster['torch.func']:.1f}"),
                *(f"{faster['curvlinops']:.1f}", f"{row['difference']:.0e}"),
                f"{row['target']:g}",
                verdict(faster["torch.func"], smallest=row["target"]),
            ]
        )
    show(
        "Dense Hessian of one attention layer: how many times faster; target for torch.func",
        [
            *("L, d", "closed ms", "torch.ones ms", "torch.func", "curvlinops", "difference"),
            *("target", "met?"),
        ],
        rows,
        run,
    )
    one = results["factored"]
    show(
        f"Factored, L = {one['length']}, d = {one['width']}: {1e3 * one['seconds']:.0f} ms. Times "
        f"slower: H @ I {one['faster']:.0f} (target {FACTORED_TARGET:g}), Hutchinson without "
        f"diagonal {one['faster_without_diagonal']:.0f} (target {FACTORED_TARGET:g})",
        ["block", "trace", "norm", "H @ I, s", "products at 1 %", "Hutchinson, s"],
        [
            [
                *(role, f"{p['exact']['trace']:.4g}", f"{p['exact']['norm']:.4g}"),
                f"{p['seconds_of_whole_matrix']:.2f}",
                f"{p['products']['trace']}, {p['products']['norm']}",
                f"{p['seconds']:.2f}",
            ]
            for role, p in one["curvlinops"].items()
        ],
        run,
    )
    layer = results["gpt2_small"]
    show(
        f"A layer of GPT-2 small, all heads: peak {layer['gib']:.1f} GiB (target "
        f"{MEMORY_TARGET:g}); the dense block of one head takes {layer['dense_gib']:.0f} GiB",
        ["quantity", "seconds", "target", "met?"],
        [
            [name, f"{seconds:.2f}", *_key_target(name, seconds)]
            for name, seconds in layer["seconds"].items()
        ],
        run,
    )
    short = results["short"]
    show(
        f"Norm of a key block, L = {short['length']}, d = {short['width']}, "
        f"{short['sequences']} sequences",
        ["seconds", "target", "met?"],
        [
            [
                *(f"{short['seconds']:.3f}", at_most(SHORT_TARGET)),
                verdict(short["seconds"], SHORT_TARGET),
            ]
        ],
        run,
    )
    gpt = results["products"]
    show(
        f"Product with a vector, {gpt['parameters'] / 1e6:.1f}M parameters: time over curvlinops",
        ["operator", "ratio", "target", "met?"],
        [
            [name, f"{r:.2f}", at_most(PRODUCT_TARGET), verdict(r, PRODUCT_TARGET)]
            for name, r in gpt["ratio"].items()
        ],
        run,
    )


def _key_target(name: str, seconds: float) -> tuple[str, str]:
    if name not in KEY_TARGETS:
        return "", ""
    return at_most(KEY_TARGETS[name]), verdict(seconds, KEY_TARGETS[name])


def main() -> None:
    """Measure, print, save."""
    parser = Parser("hessian_speed", __doc__, threads=1)
    what = "rounds of the dense forms and the products"
    parser.add_argument("--rounds", type=positive, default=7, help=what)
    arguments = parser.parse("curvlinops")
    quick, rounds = arguments.quick, 2 if arguments.quick else arguments.rounds
    lengths, widths = (64, 128, 256, 512, 1024), (32, 64, 128, 256, 512)
    if quick:
        lengths, widths = (16, 32, 64), (8, 16, 32)
    with conditions() as run:
        # The layer of GPT-2 small comes first, since it is about peak memory.
        layer = gpt2_small(*((64, 32, 4) if quick else (1024, 768, 12)))
        results = {
            "gpt2_small": layer,
            "short": short_sequences(*((5, 40, 3) if quick else (17, 128, 64)), rounds),
            "dense": dense(list(SIZES)[:1] if quick else list(SIZES), rounds),
            "factored": factored(*((17, 8) if quick else (64, 64)), rounds),
            "products": products(TINY if quick else PRESETS["0.5M"], 8, rounds),
            "growth": cost_growth(lengths, widths, 1 if quick else 3),
        }
    tables(results, run)
    warn_if_busy(run)
    save(arguments.output, {"conditions": run, **results})
    plot_cost_growth(arguments.plot, results["growth"])


if __name__ == "__main__":
    main()
