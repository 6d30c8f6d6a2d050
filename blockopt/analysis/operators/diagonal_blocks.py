"""Parts of a model's operator: any set of entries of its vectors, with products that are counted, and probes that are noted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from blockopt.analysis.operators.model_operators import ModelOperator
from blockopt.analysis.spectral.trace import Estimate
from blockopt.blocks import ROLES, Blocks
from blockopt.blocks.groups import Level, block_groups
from blockopt.measure.closures import Loss

Result = TypeVar("Result")


class Ticker:
    """Moves a progress bar by each batch of each product; the closures of the operators tell it when one is done.

    Args:
        num_batches: Of a product.
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self.advance: Callable[[int], None] = lambda _: None
        self._columns = 0  # of the product that runs now

    def watched(self, closure: Loss) -> Loss:
        """The closure, which ticks if it is called in a product."""

        def run() -> Any:
            result = closure()
            if self.num_batches > 1:
                self.advance(self._columns)
            return result

        return run

    def product(self, v: Tensor, times: Callable[[Tensor], Result]) -> Result:
        """`times(v)`, counted; of a single batch the graph is kept, so that no closure tells."""
        self._columns = 1 if v.ndim == 1 else v.shape[1]
        result = times(v)
        if self.num_batches == 1:
            self.advance(self._columns)
        self._columns = 0
        return result


class Part:
    """`A[i, i]` of a model's operator A for a set of indices i, as an operator.

    Args:
        operator: A, which differentiates no more parameters than are needed.
        entries: The indices i in the vectors of A; None for all.
        ticker: Counts the products.
    """

    def __init__(self, operator: ModelOperator, entries: Tensor | None, ticker: Ticker) -> None:
        self._operator, self._entries, self._ticker = operator, entries, ticker
        size = operator.shape[0] if entries is None else len(entries)
        self.shape, self.dtype, self.device = (size, size), operator.dtype, operator.device

    def __matmul__(self, v: Tensor, /) -> Tensor:
        """The product with (n,) or (n, k)."""
        if self._entries is None:
            return self._ticker.product(v, self._operator.__matmul__)
        where = self._entries.to(self.device)
        padded = v.new_zeros(self._operator.shape[0], *v.shape[1:]).index_copy(0, where, v)
        return self._ticker.product(padded, self._operator.__matmul__)[where]

    @contextmanager
    def kept_graph(self) -> Iterator[None]:
        """Keep the graph from product to product if there is one batch, whose memory every product takes anyway."""
        if self._ticker.num_batches > 1:
            yield
            return
        with self._operator.keep_graph():
            yield


class Probed:
    """An operator for `block_mass` that notes `z·A z` and `‖A z‖²` of every vector z that it is multiplied with."""

    def __init__(self, operator: Part) -> None:
        self._operator = operator
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device
        self._forms: list[Tensor] = []
        self._squares: list[Tensor] = []

    def __matmul__(self, v: Tensor, /) -> Tensor:
        """The product with (n, k)."""
        product = self._operator @ v
        self._forms.append((v * product).sum(0, dtype=torch.float64).cpu())
        self._squares.append(product.square().sum(0, dtype=torch.float64).cpu())
        return product

    def estimates(self, sizes: list[int], num_probes: int) -> tuple[list[Estimate], Estimate]:
        """The trace of each block, and the Frobenius norm of the whole.

        `block_mass` gives the blocks one after another, each `num_probes` vectors of random signs
        on it and 0 elsewhere, or its unit vectors if they are no more than that: sums over those
        are exact.
        """
        counts = [min(size, num_probes) for size in sizes]
        exact = [size <= num_probes for size in sizes]
        forms, squares = (
            torch.cat(self._forms).split(counts),
            torch.cat(self._squares).split(counts),
        )
        traces = [_estimate(values, known) for values, known in zip(forms, exact)]
        columns = [_estimate(values, known) for values, known in zip(squares, exact)]
        return traces, root(total(columns))


def _estimate(values: Tensor, exact: bool) -> Estimate:
    if exact:
        return Estimate(float(values.sum()), 0.0, len(values))
    return Estimate(float(values.mean()), float(values.std()) / math.sqrt(len(values)), len(values))


def total(estimates: list[Estimate]) -> Estimate:
    """The sum of independent estimates.

    Example:
        >>> total([Estimate(1.0, 3.0, 10), Estimate(2.0, 4.0, 10)])
        Estimate(value=3.0, standard_error=5.0, num_products=20)
    """
    values, errors, products = zip(*estimates)
    return Estimate(sum(values), math.hypot(*errors), sum(products))


def root(squared: Estimate) -> Estimate:
    """The square root; its standard error to first order."""
    value = math.sqrt(max(squared.value, 0.0))
    return Estimate(
        value, squared.standard_error / (2 * value) if value > 0 else 0.0, squared.num_products
    )


def find_parts(
    operator: ModelOperator, blocks: Mapping[str, Blocks], by: Level, ticker: Ticker
) -> dict[str, tuple[Part, Tensor]]:
    """Each diagonal block as an operator, and where it lies in the vectors of the whole.

    Args:
        operator: Of the whole.
        blocks: Of its parameters.
        by: As for `block_scales`: "role", "layer", "tensor" or "head". The first two pool blocks of
            several parameters.
        ticker: Counts the products.
    """
    if by == "head":
        return {
            label: (Part(one, None, ticker), operator.entries(label))
            for label, one in operator.blocks().items()
        }
    labels, groups = block_groups(blocks, by)
    members: dict[str, list[tuple[str, int]]] = {label: [] for label in labels}
    for name, group in groups.items():
        for index, number in enumerate(group.tolist()):
            members[labels[number]].append((name, index))
    parts = {}
    for label in labels if by == "tensor" else sorted(labels, key=_layer_and_role):
        entries = torch.cat([operator.entries(*member) for member in members[label]])
        restricted = operator.restrict({name for name, _ in members[label]})
        inside = torch.cat([restricted.entries(*member) for member in members[label]])
        parts[label] = (
            Part(restricted, None if len(inside) == restricted.shape[0] else inside, ticker),
            entries,
        )
    return parts


def _layer_and_role(label: str) -> tuple[int, int]:
    layer, _, role = label.rpartition(".")
    return int(layer) if layer else -1, ROLES.index(role)
