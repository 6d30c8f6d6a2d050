"""The dominant input directions of hidden matrices, damped before the orthogonalization.

The Hessian block of a linear map `y = W x` is close to `E[x xᵀ] ⊗ (curvature of y)`, and Newton's
step multiplies the gradient by the inverse of the first factor. Of its eigenvalues few are large:
that of the mean input alone may hold half of the trace. Gradients are full of noise along these
directions, and the orthogonalization, which sees one momentum at a time, cannot tell. A sketch of
the second moment `C` of the gradient's rows `G`, which is `E[x xᵀ]` as the loss weighs it, finds
them (`nystrom.py`):

    S ← β₂ S + (1 − β₂) Gᵀ(G Ω)        C ≈ B Bᵀ + μ
    D ← D μ (B Bᵀ + μ)⁻¹ = D − D B (BᵀB + μ)⁻¹ Bᵀ

`D` is the momentum that is then orthogonalized. State: `S` for each matrix and `Ω` for each
parameter, 8 numbers per input each, and the trace of `C`. Ranks that share a parameter add up
vectors of this size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockopt.blocks import Blocks
from blockopt.distributed import Reduced, is_sharded, local, sums_over_ranks
from blockopt.distributed.shards import local_range, shard_dims
from blockopt.optim.block_squares import accumulation_dtype
from blockopt.optim.entry import Entry
from blockopt.optim.finite_gradients import keep_if, put_back
from blockopt.optim.nystrom import cholesky, dominant_directions, new_probes, times_thin

PROBES = 8  # columns of Ω


class Damped(NamedTuple):
    """A direction to damp, beside the gradient that tells how.

    Attributes:
        entry: The parameter.
        gradient: Its gradient, known to be finite.
        direction: What is damped, in place.
        forget: One minus the decay rate of the sketch.
        found_inf: Where it is 1 the state may not change. None if that is ruled out.
    """

    entry: Entry
    gradient: Tensor
    direction: Tensor
    forget: float
    found_inf: Tensor | None


class Maps(NamedTuple):
    """The dimensions of a parameter that holds linear maps.

    Attributes:
        stack: The dimension that counts stacked maps, None if there is none.
        out: The dimension of the outputs, along which fused maps follow one another.
        inp: The dimension of the inputs.
    """

    stack: int | None
    out: int
    inp: int


def maps_of(blocks: Blocks) -> Maps:
    """Where the inputs and outputs of a hidden matrix are.

    A split runs along the outputs, except in the output projection of attention, whose heads are
    inputs. An unsplit parameter is taken for that of `nn.Linear`.

    Example:
        >>> from blockopt.blocks import Split
        >>> maps_of(Blocks(("output",), split=Split(0, (16,), (2,)))).inp  # a `Conv1D`
        0
    """
    split = blocks.split
    if split is None:
        return Maps(None, 0, 1)
    stack, first = (0, 1) if split.stack > 1 else (None, 0)
    other = 2 * first + 1 - split.dim
    if "output" in blocks.roles and "query" not in blocks.roles:  # both are in stacks of all four
        return Maps(stack, other, split.dim)
    return Maps(stack, split.dim, other)


def num_fused(blocks: Blocks) -> int:
    """How many maps of the same inputs are fused, such as query, key and value."""
    split = blocks.split
    return 1 if split is None or "output" in blocks.roles else len(split.sizes)


def new_input_state(parameter: Tensor, blocks: Blocks) -> dict[str, Tensor]:
    """The state before the first step, empty if inputs or outputs have several dimensions.

    So it is where heads have a dimension of their own.
    """
    plain = (
        parameter.shape[2:].numel() == 1 if maps_of(blocks).stack is None else parameter.ndim == 3
    )
    if not plain:
        return {}
    maps, number, device = maps_of(blocks), num_fused(blocks), parameter.device
    stack = 1 if maps.stack is None else parameter.shape[maps.stack]
    inputs = parameter.numel() // max(1, stack * parameter.shape[maps.out])
    dtype = accumulation_dtype(parameter)
    probes = new_probes(inputs, PROBES, dtype, device)
    sketch = torch.zeros(stack, inputs, number * PROBES, dtype=dtype, device=device)
    trace = torch.zeros(stack, number, dtype=dtype, device=device)
    return {"input_probes": probes, "input_sketch": sketch, "input_trace": trace}


def damp_inputs(chosen: list[Damped]) -> None:
    """Update the sketches of parameters, and damp the dominant inputs in their directions."""
    parts = [OwnPart(damped.entry) for damped in chosen]
    probes = [damped.entry.state["input_probes"] for damped in chosen]
    gradients = [part.as_maps(damped.gradient) for part, damped in zip(parts, chosen)]
    _add_to_sketches(chosen, parts, gradients, _products(parts, gradients, probes))
    found = [dominant_inputs(damped.entry.state) for damped in chosen]
    directions = [part.as_maps(damped.direction) for part, damped in zip(parts, chosen)]
    shares = _products(parts, directions, [basis for basis, _ in found])
    for damped, part, maps, share, (_, dual) in zip(chosen, parts, directions, shares, found):
        back = part.own_inputs(dual).mT
        if part.is_viewed(damped.direction):
            maps.baddbmm_(share, back, alpha=-1)
        else:
            local(damped.direction).sub_(part.as_stored(share @ back))


def dominant_inputs(state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """`B` and `B (BᵀB + μ)⁻¹`, of (stack, inputs, fused maps · columns) both.

    Where rounding leaves no Cholesky factor, both are 0: this step damps nothing.
    """
    probes, sketch, trace = (state[f"input_{name}"] for name in ("probes", "sketch", "trace"))
    sketch = sketch.unflatten(2, (-1, PROBES)).transpose(1, 2)  # (stack, fused, inputs, columns)
    basis, gram, rest = dominant_directions(probes, sketch, trace)
    factor, failed = cholesky(gram, rest)
    dual = torch.cholesky_solve(basis.mT, factor).mT.masked_fill(failed, 0.0)
    return basis.transpose(1, 2).flatten(2), dual.transpose(1, 2).flatten(2)


def _add_to_sketches(
    chosen: list[Damped], parts: list[OwnPart], gradients: list[Tensor], probed: list[Tensor]
) -> None:
    """`S ← β₂ S + (1 − β₂) Gᵀ(G Ω)`, and the same for the trace of `GᵀG`."""
    sums: list[Reduced] = []
    for part, gradient, products in zip(parts, gradients, probed):
        squares = torch.linalg.vector_norm(gradient, dim=2, keepdim=True).square()
        sums.append(part.reduced(times_thin(gradient.mT, products), part.maps.inp))
        sums.append(part.reduced(part.masked(squares, 1).sum(dim=1)))
    new = iter(sums_over_ranks(sums))
    for damped in chosen:
        states = [damped.entry.state[name] for name in ("input_sketch", "input_trace")]
        kept = keep_if(damped.found_inf, states)
        for state in states:
            state.lerp_(next(new).view_as(state), damped.forget)
        put_back(damped.found_inf, states, kept)


def _products(parts: list[OwnPart], maps: list[Tensor], matrices: list[Tensor]) -> list[Tensor]:
    """Products of maps with matrices of (inputs, columns), for the outputs that a rank holds.

    Ranks that hold different inputs of the same outputs add up.
    """
    found = [
        part.masked(times_thin(some, part.own_inputs(matrix)), PROBES)
        for part, some, matrix in zip(parts, maps, matrices)
    ]
    cut = [index for index, part in enumerate(parts) if part.inputs_are_cut]
    sums = sums_over_ranks([parts[i].reduced(found[i], parts[i].maps.out) for i in cut])
    for index, whole in zip(cut, sums):
        found[index] = parts[index].own_outputs(whole.view(-1, found[index].shape[2]))
    return found


class OwnPart:
    """The part of a parameter that this rank holds, as maps of (stack, outputs, inputs).

    Fused maps of equal size that follow one another count as a stack. Others are one map, and a
    mask tells which of its outputs belong to which.
    """

    def __init__(self, entry: Entry) -> None:
        self.parameter, self.maps = entry.parameter, maps_of(entry.blocks)
        self.number = num_fused(entry.blocks)
        self._wide = accumulation_dtype(self.parameter)
        self._apart = self.number > 1 and self._can_be_taken_apart(entry.blocks)
        masks = self.number > 1 and not self._apart
        self._mask = self._members(entry.blocks) if masks else None

    def _can_be_taken_apart(self, blocks: Blocks) -> bool:
        split = blocks.split
        assert split is not None
        follow = split.repeat == 1 and len(set(split.sizes)) == 1
        return follow and self.maps.stack is None and not is_sharded(self.parameter)

    def _members(self, blocks: Blocks) -> Tensor:
        """Which of the fused maps each output belongs to: 0 or 1, of (outputs, fused maps)."""
        split = blocks.split
        assert split is not None
        own = torch.eye(self.number, dtype=self._wide, device=self.parameter.device)
        members = torch.cat([row.expand(size, -1) for row, size in zip(own, split.sizes)])
        return self._own(members.repeat(split.repeat, 1), [self.maps.out])

    @property
    def inputs_are_cut(self) -> bool:
        """Whether other ranks hold other inputs."""
        return is_sharded(self.parameter) and any(
            placement.dim == self.maps.inp for _, placement in shard_dims(self.parameter)
        )

    def as_maps(self, tensor: Tensor) -> Tensor:
        """The own part of a tensor that is laid out as the parameter is."""
        part, (stack, out, inp) = local(tensor).to(self._wide), self.maps
        if stack is None:
            one = part.movedim((out, inp), (0, 1)).flatten(1)
            return one.unflatten(0, (self.number, -1)) if self._apart else one[None]
        return part.movedim((out, inp), (1, 2))

    def is_viewed(self, tensor: Tensor) -> bool:
        """Whether `as_maps` is sure to be a view of the tensor, not a copy."""
        return tensor.dtype == self._wide and tensor.ndim == (2 if self.maps.stack is None else 3)

    def as_stored(self, maps: Tensor) -> Tensor:
        """The way back."""
        (stack, out, inp), shape = self.maps, list(local(self.parameter).shape)
        dtype = self.parameter.dtype
        if stack is not None:
            return maps.movedim((1, 2), (out, inp)).to(dtype)
        moved = maps.reshape(shape[out], shape[inp], *shape[2:])
        return moved.movedim((0, 1), (out, inp)).to(dtype)

    def masked(self, columns: Tensor, width: int) -> Tensor:
        """Return the part for the map of each output, of (stack, outputs, fused maps · width).

        Columns that all fused maps share are given once, and returned for each.
        """
        if self._mask is None:
            return columns
        apart: Tensor = columns.unflatten(2, (-1, width))
        return (apart * self._mask[:, :, None]).flatten(2)

    def own_inputs(self, whole: Tensor) -> Tensor:
        """The rows of (inputs, columns) or (stack, inputs, columns) that this rank holds."""
        stack, _, inp = self.maps
        if self._apart and whole.ndim == 3:
            return whole[0].view(len(whole[0]), self.number, -1).transpose(0, 1)
        return self._own(whole, [inp] if whole.ndim == 2 else [stack, inp])

    def own_outputs(self, whole: Tensor) -> Tensor:
        """Those of (stack · outputs, columns), as (stack, outputs, columns)."""
        stack, out, _ = self.maps
        outputs = self.parameter.shape[out]
        return self._own(whole.view(-1, outputs, whole.shape[1]), [stack, out])

    def reduced(self, part: Tensor, dim: int | None = None) -> Reduced:
        """Sums of (stack, …) or (stack, what `dim` counts, …), to be added up over ranks."""
        stack = self.maps.stack
        dims = tuple(d for d in (stack, dim) if d is not None)
        if self._apart:
            part = part.transpose(0, 1).flatten(1)[None]
        return Reduced(part[0] if stack is None else part, self.parameter, dims)

    def _own(self, whole: Tensor, dims: list[int | None]) -> Tensor:
        if not is_sharded(self.parameter):
            return whole
        for axis, dim in enumerate(dims):
            if dim is not None:
                start, end = local_range(self.parameter, dim)
                whole = whole.narrow(axis, start, end - start)
        return whole
