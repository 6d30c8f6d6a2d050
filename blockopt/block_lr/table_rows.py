"""How the rows of a table differ in curvature: by how often their tokens stand in the text.

The Hessian block of a row of an embedding or a head is proportional to the frequency of its token,
and frequencies differ by orders of magnitude, which one scale for all rows leaves out. So is the
mean squared gradient of the row, which training computes anyway. With `q_i` that of row `i`,
averaged over steps, and `q` that of the whole group of rows,

    factor_i = (q_i / q + FLOOR) ** power,    over the geometric mean of the group.

Every step counts alike, however long its gradient, so clipping and gradient scaling cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from blockopt.blocks import Blocks, Level, block_groups, sum_groups
from blockopt.distributed import placed_like
from blockopt.measure.closures import block_dots

FLOOR = 0.1  # what a row without any gradient counts as, in parts of the mean of its group


class TableRows:
    """Adds up the squared gradients of the rows of all tables while the optimizer steps.

    It reads the gradients of the tables once per step, and nothing waits for it.

    Attributes:
        sums: For each row, the sum over steps of its share in the squared gradients of the tables.

    Example:
        >>> from blockopt.blocks import Split
        >>> blocks = {"table": Blocks(("embedding",), None, Split(dim=0, sizes=(2,), parts=(2,)))}
        >>> rows = TableRows()
        >>> rows.sums = {"table": torch.tensor([0.9, 0.1])}
        >>> rows.logs(blocks, {"table": torch.ones(2)}, "role", power=-1.0)["table"].exp()
        tensor([0.3974, 2.5166], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self._names: list[str] = []
        self._tables: dict[str, Blocks] = {}

    @torch.no_grad()
    def after_step(
        self,
        parameters: Callable[[], Mapping[str, Tensor]],
        blocks: Callable[[], Mapping[str, Blocks]],
    ) -> None:
        """Take a sample of the gradients that the step has used."""
        trained, squares = parameters(), {}
        if list(trained) != self._names:
            self._names, known = list(trained), blocks()
            shapes = {name: tuple(trained[name].shape) for name in trained if name in known}
            self._tables = {n: known[n] for n, shape in shapes.items() if known[n].is_table(shape)}
        for name, table in self._tables.items():
            gradient = trained[name].grad
            if gradient is not None:
                gradient = placed_like(gradient, trained[name])
                squares[name] = block_dots(gradient, gradient, table).double()
        totals = [of_rows.sum() for of_rows in squares.values()]
        for name, of_rows in squares.items():
            # A step without any gradient, or of one that is not finite, adds nothing.
            share = (of_rows / sum(t.to(of_rows) for t in totals)).nan_to_num(nan=0.0, posinf=0.0)
            self.sums[name] = share + self.sums[name].to(share) if name in self.sums else share

    def logs(
        self,
        blocks: Mapping[str, Blocks],
        numel: Mapping[str, Tensor],
        by: Level,
        power: float,
    ) -> dict[str, Tensor]:
        """Return the logarithms of the factors of all rows; their mean over a group is 0.

        Args:
            blocks: What `find_blocks(model)` returns.
            numel: `{parameter name: number of entries of each block}`.
            by: The groups; see `block_scales`. For "head", where each row is one, factors are 1.
            power: The power of the mean squared gradient.
        """
        tables = {name: blocks[name] for name in self.sums}
        labels, groups = block_groups(tables, by)

        def means(values: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
            sums = (sum_groups(part, groups, len(labels)) for part in (values, weights))
            return torch.divide(*sums)

        squares = {name: total.cpu() for name, total in self.sums.items()}
        mean = means(squares, {name: numel[name] for name in tables})
        mean = torch.where(mean > 0, mean, 1.0)
        logs = {
            name: power * (squares[name] / numel[name] / mean[groups[name]] + FLOOR).log()
            for name in tables
        }
        centre = means(logs, {name: torch.ones_like(log) for name, log in logs.items()})
        return {name: log - centre[groups[name]] for name, log in logs.items()}
