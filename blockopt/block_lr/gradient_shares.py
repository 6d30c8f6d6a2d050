"""How the blocks of one group differ in curvature, told by how they share its squared gradient.

One scale per role leaves out what differs inside the role, above all among the rows of a table: the
Hessian of a row is proportional to how often its token stands in the text, which differs by orders
of magnitude. So is its mean squared gradient, which training computes anyway. With `q_b` the mean
squared gradient of the entries of block `b`, averaged over steps, and `q` that of its group,

    factor_b = (q_b / q + FLOOR) ** power,    over the geometric mean of the group.

Every step counts alike, however long its gradient, so clipping and gradient scaling cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from blockopt.blocks import Blocks, Level, block_groups, sum_groups
from blockopt.distributed import placed_like
from blockopt.measure.closures import block_dots

SPACING = 5  # steps from one sample to the next
FLOOR = 0.1  # what a block without any gradient counts as, in parts of the mean of its group


class GradientShares:
    """Adds up the squared gradients of the blocks while the optimizer steps.

    It costs one reading of the gradients in one of five steps, and nothing waits for it.

    Args:
        power: The power of the mean squared gradient within a group.

    Attributes:
        sums: For each block, the sum over steps of its share in the squared gradient of the model.

    Example:
        >>> from blockopt.blocks import Split
        >>> shares = GradientShares(power=-0.5)
        >>> shares.sums = {"table": torch.tensor([0.9, 0.1])}
        >>> blocks = {"table": Blocks(("embedding",), None, Split(dim=0, sizes=(2,), parts=(2,)))}
        >>> shares.logs(blocks, {"table": torch.ones(2)}, "role")["table"].exp()
        tensor([0.6304, 1.5864], dtype=torch.float64)
    """

    def __init__(self, power: float) -> None:
        self._power = power
        self.sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def after_step(
        self,
        number: int,
        parameters: Callable[[], Mapping[str, Tensor]],
        blocks: Callable[[], Mapping[str, Blocks]],
    ) -> None:
        """Take a sample of the gradients that the step of this number has used, if it is time."""
        if (number - 1) % SPACING:
            return
        known, squares = blocks(), {}
        for name, parameter in parameters().items():
            if parameter.grad is not None and name in known:
                gradient = placed_like(parameter.grad, parameter)
                squares[name] = block_dots(gradient, gradient, known[name]).double()
        totals = [of_blocks.sum() for of_blocks in squares.values()]
        total = sum(some.to(totals[0].device) for some in totals)
        for name, of_blocks in squares.items():
            # A step without any gradient, or of one that is not finite, adds nothing.
            share = (of_blocks / total).nan_to_num(nan=0.0, posinf=0.0)
            self.sums[name] = share + self.sums[name].to(share) if name in self.sums else share

    def logs(
        self, blocks: Mapping[str, Blocks], numel: Mapping[str, Tensor], by: Level
    ) -> dict[str, Tensor]:
        """Return the logarithms of the factors, whose mean over the blocks of a group is 0.

        Args:
            blocks: What `find_blocks(model)` returns.
            numel: `{parameter name: number of entries of each block}`.
            by: The groups; see `block_scales`.
        """
        labels, groups = block_groups(blocks, by)

        def group_sums(values: Mapping[str, Tensor]) -> Tensor:
            return sum_groups(values, groups, len(labels))

        squares = {
            name: self.sums[name].to("cpu", torch.float64)
            if name in self.sums
            else torch.zeros(entry.num_blocks, dtype=torch.float64)
            for name, entry in blocks.items()
        }
        means = group_sums(squares) / group_sums(numel)
        means = torch.where(means > 0, means, 1.0)
        logs = {
            name: self._power * (squares[name] / numel[name] / means[groups[name]] + FLOOR).log()
            for name in blocks
        }
        count = group_sums({name: torch.ones_like(log) for name, log in logs.items()})
        centres = group_sums(logs) / count
        return {name: log - centres[groups[name]] for name, log in logs.items()}
