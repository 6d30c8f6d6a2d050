"""The factors of KFAC: second moments of what enters and leaves the linear maps of a model.

For a matrix that is applied to rows `a` (one per token) with derivatives `g` by its outputs,
KFAC-expand (Martens and Grosse 2015; Eschenhagen et al. 2023) takes

    G ≈ B ⊗ A,   A = mean over rows of a aᵀ,   B = Σ over s and rows of g gᵀ,   g = ∂(s·f)/∂output,

where f are the predictions and `Σ s sᵀ = Λ` is the Hessian of the loss in them. Each s belongs to
the prediction of one position: derivatives of several positions at once would add products between
positions, which are no part of the Gauss-Newton matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockopt.analysis.operators.pull_back import pull_back
from blockopt.blocks import read_linear
from blockopt.measure.closures import (
    Evaluation,
    LossClosure,
    average_over_batches,
    trainable_parameters,
)
from blockopt.measure.loss_curvature import CaptureLosses, LossCurvature
from blockopt.measure.second_derivatives import twice_differentiable

ENTRIES_AT_ONCE = 2**22  # of derivatives by outputs, for as many vectors s


class LinearMap(NamedTuple):
    """A module that applies a matrix to the last dimension of its input.

    Attributes:
        module: The module.
        outputs_first: Whether the matrix is stored as (outputs, inputs), as `nn.Linear` does.
    """

    module: nn.Module
    outputs_first: bool


class Factors(NamedTuple):
    """The two factors of a matrix, for the rows and for the columns in which it is stored.

    In row-major order the matrix of curvature is approximately `rows ⊗ columns`.
    """

    rows: Tensor
    columns: Tensor

    def block(self, entries: Tensor) -> Factors:
        """Return the factors of a block.

        Args:
            entries: Where the block lies in the flattened matrix. It must be a grid of rows and
                columns, as heads are.
        """
        width = len(self.columns)
        i, j = (entries // width).unique(), (entries % width).unique()
        if len(i) * len(j) != len(entries):
            raise ValueError(
                f"Invalid block of {len(entries)} entries in {len(i)} rows and {len(j)} columns. "
                "Must be whole rows or columns of its matrix."
            )
        return Factors(self.rows[i][:, i], self.columns[j][:, j])

    def eigenbasis(self) -> tuple[Factors, Tensor]:
        """Return the eigenvectors of both, and all products of their eigenvalues, (rows, columns).

        The eigenvalues of a second moment are not negative: what rounding puts below 0 is 0.
        """
        (p, U), (q, V) = (torch.linalg.eigh(factor) for factor in self)
        return Factors(U, V), p.clamp(min=0).outer(q.clamp(min=0))


def linear_maps(model: nn.Module, names: Sequence[str]) -> dict[str, LinearMap]:
    """Return the linear maps among some parameters: those of 2 dimensions that one module owns.

    Embeddings, heads tied to them, and matrices that are no weight of a module are none.
    """
    chosen = {id(p): name for name, p in trainable_parameters(model).items() if name in set(names)}
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None and id(p) in chosen:
                owners.setdefault(id(p), []).append(module)
    found = {}
    for key, name in chosen.items():
        linear = read_linear(owners[key][0]) if len(owners.get(key, [])) == 1 else None
        if linear is not None and id(linear.weight) == key and linear.weight.ndim == 2:
            found[name] = LinearMap(owners[key][0], linear.out_dim == 0)
    return {name: found[name] for name in names if name in found}


class Call(NamedTuple):
    """One application of a linear map: its input (rows, inputs), and its output in the graph."""

    input: Tensor
    output: Tensor


@contextmanager
def recorded_calls(maps: Mapping[str, LinearMap]) -> Iterator[dict[str, list[Call]]]:
    """Record all calls of the maps while inside.

    Raises:
        ValueError: If a module does something else than apply its matrix.
    """
    calls: dict[str, list[Call]] = {name: [] for name in maps}

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            x = inputs[0].detach()
            calls[name].append(Call(x.reshape(-1, x.shape[-1]), output))
            _check_linear(name, maps[name], x, output.detach())
            return output.clone()  # which may be changed in place

        return keep

    handles = [m.module.register_forward_hook(hook(name)) for name, m in maps.items()]  # type: ignore[arg-type]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _check_linear(name: str, own: LinearMap, x: Tensor, output: Tensor) -> None:
    """Raise if the first row of the output is not the matrix times that of the input."""
    weight, bias = own.module._parameters["weight"], own.module._parameters.get("bias")
    matrix = weight.detach() if own.outputs_first else weight.detach().T  # type: ignore[union-attr]
    first = x.reshape(-1, x.shape[-1])[:1].to(matrix) @ matrix.T
    first = first if bias is None else first + bias.detach()
    seen = output.reshape(-1, output.shape[-1])[:1].to(first)
    tolerance = torch.finfo(output.dtype).eps ** 0.5
    if seen.shape != first.shape or not torch.allclose(seen, first, tolerance, tolerance):
        raise ValueError(
            f"The module of {name!r}, {type(own.module).__name__}, does not only multiply by its "
            "matrix, so that it has no Kronecker factors. Leave it out (only)."
        )


Vectors = Callable[[LossCurvature], Iterator[list[Tensor]]]
Visit = Callable[[str, Tensor, Tensor], Tensor]


class Visited(NamedTuple):
    """What `over_derivatives` found of a map: the mean of `a aᵀ`, and the sum of what was asked."""

    inputs: Tensor
    total: Tensor


def over_derivatives(
    model: nn.Module,
    closures: Sequence[LossClosure],
    maps: Mapping[str, LinearMap],
    vectors: Vectors,
    visit: Visit,
) -> dict[str, Visited]:
    """Sum a function of the derivatives by the outputs of linear maps, averaged over the batches.

    Args:
        model: The model.
        closures: The loss of each batch.
        maps: The linear maps. Those that no loss uses are left out.
        vectors: Returns the vectors s of a batch.
        visit: Takes the name of a map, its inputs (rows, inputs) and derivatives (m, rows, outputs)
            along m vectors, all calls joined and in float64, and returns a tensor to sum.
    """

    def measure(evaluation: Evaluation) -> dict[tuple[str, int], Tensor]:
        with twice_differentiable(), recorded_calls(maps) as calls, CaptureLosses() as seen:
            loss = evaluation()
        curvature = LossCurvature(loss, seen.calls)
        used = {name: some for name, some in calls.items() if some}
        inputs = {n: torch.cat([call.input for call in own]).double() for n, own in used.items()}
        outputs = [call.output for own in used.values() for call in own]
        totals = {(name, 0): a.T @ a / len(a) for name, a in inputs.items()}
        chunk = max(1, ENTRIES_AT_ONCE // max(1, sum(output.numel() for output in outputs)))
        remaining = vectors(curvature)
        while some := list(islice(remaining, chunk)):
            along = [torch.stack(parts) for parts in zip(*some)]
            with twice_differentiable():
                found = iter(pull_back(curvature.predictions, outputs, along).products)
            for name, own in used.items():
                pieces = [next(found) for _ in own]
                g = torch.cat([x.reshape(len(some), -1, x.shape[-1]) for x in pieces], 1).double()
                value, key = visit(name, inputs[name], g), (name, 1)
                totals[key] = totals[key] + value if key in totals else value
        return totals

    found = average_over_batches(model, list(closures), measure)
    return {name: Visited(found[name, 0], found[name, 1]) for name in maps if (name, 0) in found}


def kronecker_factors(
    model: nn.Module,
    closures: Sequence[LossClosure],
    maps: Mapping[str, LinearMap],
    vectors: Vectors,
) -> dict[str, Factors]:
    """Return the factors of each map that a loss uses, in float64."""

    def second_moment(name: str, a: Tensor, g: Tensor) -> Tensor:
        rows = g.flatten(0, 1)
        return rows.T @ rows

    found = over_derivatives(model, closures, maps, vectors, second_moment)
    return {
        name: Factors(B, A) if maps[name].outputs_first else Factors(A, B)
        for name, (A, B) in found.items()
    }


def squares_in_basis(
    model: nn.Module,
    closures: Sequence[LossClosure],
    maps: Mapping[str, LinearMap],
    vectors: Vectors,
    bases: Mapping[str, Sequence[tuple[Tensor, Factors]]],
) -> dict[str, list[Tensor]]:
    """Return the eigenvalues of EKFAC: the diagonal of G in bases of blocks, from the vectors s.

    Args:
        model: The model.
        closures: The loss of each batch.
        maps: The linear maps.
        vectors: Returns the vectors s of a batch.
        bases: For blocks of each map, their entries in the flattened matrix, and orthonormal bases
            for their rows and columns.

    Returns:
        For each block of each map, `Σ_s (u_i⊗v_j · ∂(s·f)/∂W)²`, (rows, columns).
    """

    def squares(name: str, a: Tensor, g: Tensor) -> Tensor:
        gradients = g.mT @ a if maps[name].outputs_first else (g.mT @ a).mT
        flat, found = gradients.flatten(1), []
        for entries, (U, V) in bases[name]:
            block = flat[:, entries].reshape(len(flat), len(U), len(V))
            found.append((U.T @ block @ V).square().sum(0).flatten())
        return torch.cat(found)

    chosen = {name: maps[name] for name in bases}
    visited = over_derivatives(model, closures, chosen, vectors, squares)
    split = {}
    for name, some in bases.items():
        pieces = visited[name].total.split([len(entries) for entries, _ in some])
        split[name] = [x.reshape(len(U), len(V)) for x, (_, (U, V)) in zip(pieces, some)]
    return split
