"""Work that all ranks do together, and that fails on all of them if it fails on one.

A rank that fails leaves the others waiting for it in the next collective operation. So before each
one the ranks meet: whoever has failed says so there, and all of them stop with an error.

The passes of a sharded model wait for all ranks too, and nobody can meet inside of them. The ranks
meet where a forward pass begins and between the passes; a rank that fails within a pass ends the
work with an error that cannot be survived.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from blockopt.distributed.ranks import num_ranks
from blockopt.distributed.shards import is_sharded
from blockopt.errors import LostRankError, NoLossError, OtherRankError, may_pass


class _Meeting:
    """The state of the work.

    Attributes:
        failed: Whether all ranks know of a failure.
        in_pass: Whether other ranks may wait for this one within a pass.
        watched: Whether calls of the model are being watched.
    """

    def __init__(self) -> None:
        self.failed = False
        self.in_pass = False
        self.watched = False


_current: ContextVar[_Meeting | None] = ContextVar("meeting", default=None)


@contextmanager
def together() -> Iterator[None]:
    """Do what follows on all ranks; if it fails on one, it fails on all.

    Raises:
        OtherRankError: If another rank has failed in a way that may pass.
        RuntimeError: If another rank has failed in another way.
        LostRankError: If this rank has failed inside of a pass that the others wait in.
    """
    if num_ranks() == 1:
        yield
        return
    meeting = _Meeting()
    token = _current.set(meeting)
    try:
        yield
        meet("the end")
    except Exception as error:
        if not meeting.failed:
            if meeting.in_pass:
                raise LostRankError(
                    f"Rank {dist.get_rank()} has failed inside of a forward or backward pass of a "
                    f"sharded model, where the other ranks wait for it. {_text(error)} Training "
                    "cannot go on: start again from a checkpoint, and if memory was short, measure "
                    "on a smaller batch."
                ) from error
            _meet(meeting, "", error)
        raise
    finally:
        _current.reset(token)


def are_together() -> bool:
    """Whether all ranks do the present work together."""
    return _current.get() is not None


def meet(where: str) -> None:
    """Wait for all ranks, and raise if one has failed; does nothing outside of `together`.

    Args:
        where: The place in the work; all ranks must be at the same.
    """
    meeting = _current.get()
    if meeting is not None:
        _meet(meeting, where, None)


def union_over_ranks(names: set[str]) -> set[str]:
    """The names that some rank has, for ranks that do the present work together."""
    meeting = _current.get()
    if meeting is None:
        return names
    _meet(meeting, "names of parameters", None)
    everyone: list[Any] = [None] * num_ranks()
    dist.all_gather_object(everyone, names)
    return set().union(*everyone)


def is_same_everywhere(text: str) -> bool:
    """Whether all ranks that do the present work together pass the same text."""
    return len(union_over_ranks({str(zlib.crc32(text.encode()))})) == 1


def _meet(meeting: _Meeting, where: str, error: Exception | None) -> None:
    own = (where, None if error is None else (may_pass(error), _text(error)))
    everyone: list[Any] = [None] * num_ranks()
    dist.all_gather_object(everyone, own)
    failures = [(rank, *told) for rank, (_, told) in enumerate(everyone) if told is not None]
    places = sorted({place for place, told in everyone if told is None})
    if not failures and len(places) == 1:
        return
    meeting.failed = True
    if not failures:
        raise RuntimeError(
            f"Ranks do different things at the same time: {' and '.join(places)}. Give "
            "block_lr.step the same number of closures on every rank, which compute the same "
            "function."
        )
    lasting = [failure for failure in failures if not failure[1]]
    rank, _, text = (lasting or failures)[0]
    if error is not None and may_pass(error) == (not lasting):
        raise error
    if lasting:
        raise RuntimeError(f"Rank {rank} has failed. {text}")
    raise OtherRankError(f"Rank {rank} has failed. {text}")


def _text(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if text.endswith((".", "!", "?")) else f"{text}."


@contextmanager
def forward_together(model: nn.Module) -> Iterator[None]:
    """Run a closure that calls the model; the ranks of a sharded one meet where its pass begins.

    Raises:
        NoLossError: If the model is sharded and was not called: the other ranks would wait for it.
    """
    meeting = _current.get()
    sharded = any(is_sharded(p) for p in model.parameters())
    if meeting is None or meeting.watched or not sharded:
        yield
        return
    inside = set(model.modules())
    called: list[nn.Module] = []

    @_disable_dynamo
    def begin(module: nn.Module, _: Any) -> None:
        if not meeting.in_pass and (module in inside or model in set(module.modules())):
            meet("a forward pass")
            meeting.in_pass = True
            called.append(module)

    @_disable_dynamo
    def end(module: nn.Module, *_: Any) -> None:
        if called and module is called[-1]:
            meeting.in_pass = False

    hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]
    meeting.watched = True
    try:
        yield
    finally:
        meeting.watched = False
        for hook in hooks:
            hook.remove()
    if not called:
        raise NoLossError("The loss closure did not call the model, for which other ranks wait.")


@contextmanager
def pass_together(model: nn.Module) -> Iterator[None]:
    """Run a backward pass, in which the ranks of a sharded model wait for one another."""
    meeting = _current.get()
    if meeting is None or not any(is_sharded(p) for p in model.parameters()):
        yield
        return
    meeting.in_pass = True
    yield
    meeting.in_pass = False
