"""Which units of one tensor feed which rows of another, read from derivatives.

The derivative of a tensor with respect to another is zero exactly where nothing flows. Products
with it from the left are what autograd computes; products from the right are the derivative of
those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

_ANY, _STRONGEST = 1e-3, 0.5  # shares of the largest derivative that count; see `strong`
_DRAWS = 8  # of random signs, where a norm over all heads ties every unit to every row
_MOST_ROWS = 1024  # of one token; more are no heads


def _signs(shape: torch.Size, draw: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw)
    return (2 * torch.randint(2, shape, generator=generator) - 1).double()


def _is_derived(target: Tensor, source: Tensor) -> bool:
    """Whether autograd can tell: what a model computes without gradients has no derivative.

    A view of such a tensor may say that it requires a gradient, and know no way to it.
    """
    return source.requires_grad and (target is source or target.grad_fn is not None)


def pull(target: Tensor, source: Tensor, cotangent: Tensor) -> Tensor:
    """`cotangent` times the derivative of `target` with respect to `source`."""
    if not _is_derived(target, source):
        return torch.zeros_like(source)
    (result,) = torch.autograd.grad(
        target, source, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return result


def push(source: Tensor, target: Tensor, tangent: Tensor) -> Tensor:
    """The derivative of `target` with respect to `source`, times `tangent`."""
    if not _is_derived(target, source):
        return torch.zeros_like(target)
    dual = torch.zeros_like(target, requires_grad=True)
    (pulled,) = torch.autograd.grad(
        target, source, dual, create_graph=True, allow_unused=True, materialize_grads=True
    )
    if not pulled.requires_grad:
        return torch.zeros_like(target)
    return pull(pulled, dual, tangent)


@contextmanager
def stopped_at(tensors: list[Tensor]) -> Iterator[None]:
    """Let no derivative pass through these tensors."""
    hooks = [tensor.register_hook(torch.zeros_like) for tensor in tensors if tensor.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Side(NamedTuple):
    """A tensor of which some axes say which unit an entry is, and all others which token.

    Attributes:
        tensor: The tensor.
        axes: The axes of the units.
    """

    tensor: Tensor
    axes: tuple[int, ...]

    @property
    def others(self) -> tuple[int, ...]:
        """The axes that are not those of units."""
        return tuple(axis for axis in range(self.tensor.ndim) if axis not in self.axes)

    def signs(self, draw: int = 0) -> Tensor:
        """Random signs: on a path of views, the derivative of each entry then has modulus 1."""
        return _signs(self.tensor.shape, draw).to(self.tensor)

    def at(self, axes: tuple[int, ...], index: tuple[int, ...], draw: int = 0) -> Tensor:
        """Random entries, the same for every index, where the coordinates on `axes` are `index`.

        They are orthogonal to what the tensor holds there: to first order, such a change passes a
        norm over all heads as if its denominator were constant.
        """
        result = torch.zeros_like(self.tensor)
        where: list[int | slice] = [slice(None)] * self.tensor.ndim
        for axis, i in zip(axes, index):
            where[axis] = i
        held = self.tensor.detach()[tuple(where)].cpu().double()
        signs = _signs(held.shape, draw)
        across = signs - held * ((signs * held).sum() / held.square().sum().clamp(min=1e-300))
        chosen = across if across.norm() > 0.1 * signs.norm() else signs
        result[tuple(where)] = chosen.to(result)
        return result

    def size(self, derivative: Tensor, axes: tuple[int, ...]) -> Tensor:
        """The size of a derivative along `axes`, in their order."""
        rest = [axis for axis in range(derivative.ndim) if axis not in axes]
        squares = derivative.detach().to("cpu", torch.float64).square()
        return squares.sum(dim=rest).sqrt() if rest else squares.sqrt()


class Feeding(NamedTuple):
    """Which units feed which rows, for one token.

    Attributes:
        rows: The index of each row.
        units: (rows, *units), whether the unit feeds the row or the row the unit.
        token: The index of the token on the other axes of the units.
    """

    rows: list[tuple[int, ...]]
    units: Tensor
    token: tuple[int, ...]


def feeding(
    units: Side,
    rows: Side,
    units_of: Callable[[Tensor], Tensor],
    rows_of: Callable[[Tensor], Tensor],
) -> Feeding | None:
    """Find the rows that belong to one token, and the units that each of them is tied to.

    Heads that are shut for that token, as where each token chooses its heads, are those of another.

    Args:
        units: The side whose units are asked for.
        rows: The side whose rows are asked for; its `axes` number them.
        units_of: From a perturbation of rows to that of units.
        rows_of: From a perturbation of units to that of rows.

    Returns:
        None if nothing flows between the two.
    """
    found = _of_one_token(units, rows, units_of, rows_of)
    if found is None:
        return None
    sizes = units.size(units_of(rows.signs()), units.axes)
    shape = [n if a in units.axes else 1 for a, n in enumerate(units.tensor.shape)]
    while bool((shut := (sizes > 0) & ~found.units.any(dim=0)).any()):
        mask = shut.reshape(shape).to(units.tensor)
        others = _of_one_token(units, rows, units_of, rows_of, mask)
        if others is None or not bool((others.units.any(dim=0) & shut).any()):
            break
        if not are_heads(both := torch.cat([found.units, others.units])):
            break
        found = Feeding(found.rows + others.rows, both, found.token)
    return found


def _of_one_token(
    units: Side,
    rows: Side,
    units_of: Callable[[Tensor], Tensor],
    rows_of: Callable[[Tensor], Tensor],
    among: Tensor | float = 1.0,
) -> Feeding | None:
    """The same for a single token, and for units where `among` is 1."""
    touched = _large(rows.size(rows_of(units.signs() * among), rows.axes))
    if not touched:
        return None
    start = units_of(rows.at(rows.axes, touched[0])) * among
    token = largest(units.size(start, units.others))
    if token is None:
        return None
    found = _large(rows.size(rows_of(units.at(units.others, token) * among), rows.axes))
    if not 0 < len(found) <= _MOST_ROWS:
        return None

    def squares(draw: int) -> Tensor:
        perturbed = (units_of(rows.at(rows.axes, row, draw)) * among for row in found)
        return torch.stack([_select(p, units.others, token).cpu().double() ** 2 for p in perturbed])

    return Feeding(found, strong(squares), token)


def strong(squares: Callable[[int], Tensor], *, of_one_role: bool = True) -> Tensor:
    """Where a derivative counts, compared with its largest along the first axis.

    Nearly every derivative that is not zero counts, so that a short convolution, which ties a unit
    to the rows of a head for several tokens, ties it to all of them. If that finds no heads of one
    size, the strongest count: a norm over all heads ties every unit to every row, but weakly.

    Args:
        squares: Squared derivatives for a draw of random signs.
        of_one_role: Whether units that feed a row in common belong to one head.
    """
    total = squares(0)
    strongest = total.amax(dim=0)
    counts = strongest > 1e-12 * strongest.max()
    fed = (total >= _ANY**2 * strongest) & counts
    fed = _with_ties(fed) if of_one_role else fed
    if (
        len(fed) == 1
        or are_heads(fed)
        or bool((total[fed] > 0.99 * strongest.expand_as(total)[fed]).all())
    ):
        return fed
    total = sum((squares(draw) for draw in range(1, _DRAWS)), total)
    strongest = total.amax(dim=0)
    strictly = (total >= _STRONGEST**2 * strongest) & counts
    return strictly if are_heads(strictly) else fed


def _with_ties(fed: Tensor) -> Tensor:
    """The same with all rows of a head for each of its units, if some hardly feed one of them."""
    if are_heads(fed):
        return fed
    flat = fed.flatten(1).float()
    tied = flat @ flat.mT > 0
    for _ in range(max(1, len(tied).bit_length())):
        tied = tied.float() @ tied.float() > 0
    return (tied.float() @ flat > 0).view_as(fed)


def are_heads(fed: Tensor) -> bool:
    """Whether units that feed the same rows are several sets of one size, with no row in common."""
    columns = fed.flatten(1)[:, fed.flatten(1).any(dim=0)]
    sets, sizes = columns.unique(dim=1, return_counts=True)
    return len(sizes) > 1 and len(sizes.unique()) == 1 and bool((sets.sum(dim=1) < 2).all())


def _select(tensor: Tensor, axes: tuple[int, ...], index: tuple[int, ...]) -> Tensor:
    for axis, i in sorted(zip(axes, index), reverse=True):
        tensor = tensor.select(axis, i)
    return tensor


def _large(sizes: Tensor) -> list[tuple[int, ...]]:
    """The indices at which `sizes` is not negligible."""
    if not sizes.numel() or not sizes.max() > 0:
        return []
    return [tuple(i) for i in (sizes > 1e-6 * sizes.max()).nonzero().tolist()]


def largest(sizes: Tensor) -> tuple[int, ...] | None:
    """The index of the largest of some sizes, None if all are zero."""
    if not sizes.numel() or not sizes.max() > 0:
        return None
    return tuple((sizes == sizes.max()).nonzero()[0].tolist())
