"""What a step of BlockMuon costs each GPU of a cluster, from formulas."""

from __future__ import annotations

from dataclasses import dataclass

from blockopt.optim.divided_work import choose_owners
from blockopt.optim.input_directions import PROBES
from blockopt.optim.muon import TABLE_PROBES
from blockopt.optim.newton_schulz import orthogonalization_flops


@dataclass(frozen=True)
class Shapes:
    """The sizes of a Llama.

    Attributes:
        width: Of the residual stream.
        hidden: Width of the MLPs.
        keys: Rows of the key and value matrices.
        depth: Number of layers.
        vocabulary: Number of tokens.
    """

    width: int
    hidden: int
    keys: int
    depth: int
    vocabulary: int = 32_000

    def matrices(self) -> list[tuple[int, int]]:
        """Return the shapes of all hidden matrices."""
        attention = [(self.width, self.width)] * 2 + [(self.keys, self.width)] * 2
        mlp = [(self.hidden, self.width)] * 2 + [(self.width, self.hidden)]
        return (attention + mlp) * self.depth

    def others(self) -> int:
        """Return the number of all other parameters, embedding and head."""
        return 2 * self.vocabulary * self.width


LLAMAS = {
    "7B": Shapes(width=4096, hidden=11_008, keys=4096, depth=32),
    "70B": Shapes(width=8192, hidden=28_672, keys=1024, depth=80),
}
ITERATIONS = 4
WIRE, WEIGHT = 2, 4  # bytes of an entry that travels (bfloat16), and of one that is kept (float32)


def vector_entries(shapes: Shapes) -> tuple[int, int]:
    """Return the entries that every GPU keeps whole, and those of them that a step adds up.

    Preconditioning has the probes and the sketch of each matrix's inputs, and a number per neuron;
    a table has the same of its columns, and a number per row.
    """
    inputs = sum(columns for _, columns in shapes.matrices())
    neurons = 3 * shapes.hidden * shapes.depth
    added = PROBES * inputs + neurons + 2 * (TABLE_PROBES * shapes.width + shapes.vocabulary)
    return added + PROBES * inputs + 2 * TABLE_PROBES * shapes.width, added


def per_gpu(model: str, gpus: int) -> dict[str, float]:
    """Return what a step costs each GPU, sharded over all of them.

    With `N` entries in hidden matrices, `M` others, `G` GPUs, and vectors of `V` entries of which a
    step adds up `A` over the GPUs: state 4 (N + M) / G + 4 V bytes; received
    (2 · 2 N / G + 2 · 4 A) (1 - 1 / G) bytes; work that of the busiest owner. Undivided, every GPU
    receives 4 N (1 - 1 / G) bytes and does all of the work.
    """
    shapes = LLAMAS[model].matrices()
    work = [orthogonalization_flops(*shape, ITERATIONS) for shape in shapes]
    numels = [rows * columns for rows, columns in shapes]
    busiest = [0] * gpus
    owners = choose_owners(tuple((float(w), n) for w, n in zip(work, numels)), gpus)
    for owner, flops in zip(owners, work):
        busiest[owner] += flops
    entries, elsewhere = sum(numels), 1 - 1 / gpus
    kept, added = vector_entries(LLAMAS[model])
    return {
        "state_bytes": WEIGHT * ((entries + LLAMAS[model].others()) / gpus + kept),
        "received_undivided": WEIGHT * entries * elsewhere,
        "received": 2 * WIRE * entries / gpus * elsewhere,
        "received_vectors": 2 * WEIGHT * added * elsewhere,
        "flops_undivided": sum(work),
        "flops": max(busiest),
    }
