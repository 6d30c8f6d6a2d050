"""Steps that an optimizer refuses because a gradient is not finite: counted, and told to the user.

On a CPU the answer is known before the update begins. On an accelerator waiting for it would leave
the device idle in every step. There the kernels get the flag and leave everything as it is where it
is set; its copy for the host arrives while the next step is computed, and is read then.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from blockopt.optim.entry import Work
from blockopt.optim.finite_gradients import READ_AT_ONCE, found_nonfinite, missing_gradients
from blockopt.optim.groups import names_of
from blockopt.optim.recording import is_captured, is_recorded


class Checked(NamedTuple):
    """What a message about a step needs.

    Attributes:
        names: The names of the parameters whose gradients were checked.
        magnitudes: For each, numbers that are finite if its gradient is.
        raises: Whether a bad gradient is an error.
    """

    names: list[str]
    magnitudes: list[Tensor]
    raises: bool


class HostCopy:
    """A number on its way from the device to the host."""

    def __init__(self, number: Tensor) -> None:
        self._number = number.to("cpu", non_blocking=True, copy=True)
        self._arrived: Any = None
        if number.device.type not in READ_AT_ONCE:
            self._arrived = torch.Event(number.device.type)
            self._arrived.record()

    def read(self) -> float:
        """Wait for the copy alone, not for what the device was given to do since."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._number.item()


class RefusedSteps:
    """Counts the refused steps of an optimizer.

    Attributes:
        count: How many are known so far.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._total: Tensor | None = None  # the same count, on the device
        self._checked: Checked | None = None
        self._open: HostCopy | None = None  # of the total after the last step, not read yet
        self._replayed = False  # whether a CUDA graph adds to the total, unseen by the host
        self._error: FloatingPointError | None = None
        self._missing: int | None = None  # which gradients the last step had none of

    def check(
        self,
        groups: list[dict[str, Any]],
        work: Work,
        magnitudes: list[list[Tensor]],
        replicas: Any,
        exchanges: bool,
    ) -> tuple[Tensor | None, Checked]:
        """Whether a gradient is not finite, as a tensor on the device; None if none is checked.

        Args:
            groups: All groups of the optimizer.
            work: What the step updates.
            magnitudes: Of the gradients, which are finite exactly if these are.
            replicas: The process group whose ranks divide the work on plain parameters, if they do.
            exchanges: Whether ranks exchange amid the step.
        """
        names, numbers = [], []
        for (group, entries), some in zip(work, magnitudes):
            if group["nonfinite"] != "ignore":
                names += [entry.name for entry in entries]
                numbers += some
        wishes = {group["nonfinite"] for group in groups}
        checked = Checked(names, numbers, raises="raise" in wishes)
        if wishes <= {"ignore"}:
            return None, checked
        named = [pair for group in groups for pair in zip(names_of(group), group["params"])]
        wait = False
        if exchanges and not is_recorded():
            # It is worth waiting to hear that all ranks lack the same gradients if others are
            # missing than in the last step: an exchange of different ones would not end.
            before, self._missing = self._missing, missing_gradients([p for _, p in named])
            wait = before != self._missing
        everywhere = "skip" in wishes
        return found_nonfinite(named, numbers, everywhere, replicas, wait), checked

    @_disable_dynamo  # as torch.optim does: torch.compiler.disable would import the compiler now
    def refuse(self, checked: Checked) -> None:
        """Count a step that is known to be bad; raise if that is an error, otherwise warn once."""
        self._checked = checked
        if self._total is not None:
            self._total += 1
        self._count(1)
        self._raise()

    @_disable_dynamo
    def watch(self, found_inf: Tensor, checked: Checked) -> None:
        """Take the flag of a step, to be read by the next `settle` unless that costs nothing.

        A compiled step cannot call `settle` before it begins, so what was open is read here.
        """
        if self._total is None:
            self._total = torch.full_like(found_inf, float(self.count))
        self._total += found_inf
        if is_captured():
            self._checked, self._replayed = checked, True
            return  # a replay adds to the total, which `read` looks at when it is asked
        self.look()
        self._checked, self._open = checked, HostCopy(self._total)
        if found_inf.device.type in READ_AT_ONCE:
            self.look()
        self._raise()

    def settle(self, replays: bool = False) -> None:
        """Read what the last step has left open.

        Args:
            replays: Whether to look at all replays of a CUDA graph too, which waits for them.

        Raises:
            FloatingPointError: If that step was refused, and that is an error.
        """
        if not is_recorded():
            if replays and self._replayed:
                self.read()
            self.look()
            self._raise()

    def look(self) -> None:
        """Read what the last step has left open; an error waits for `settle`."""
        if self._open is not None:
            total, self._open = self._open.read(), None
            self._count(int(total) - self.count)

    def read(self) -> int:
        """The count including the last step, or all replays of a CUDA graph. Waits for them."""
        if self._total is not None:
            self._open = None
            self._count(int(self._total.item()) - self.count)
        return self.count

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _count(self, new: int) -> None:
        if new == 0:
            return
        first, self.count = self.count == 0, self.count + new
        assert self._checked is not None
        names, magnitudes, raises = self._checked
        if not (raises or first):
            return
        bad = [n for n, m in zip(names, magnitudes) if not bool(torch.isfinite(m).all())]
        shown = ", ".join(bad[:5]) + (", …" if len(bad) > 5 else "")
        where = f"in {len(bad)} of {len(names)} parameters ({shown})"
        if not bad:
            where = "on another rank, or a gradient that is missing (None) on some ranks only"
            if self._replayed:
                where += ", or in a replay of the CUDA graph before the last one"
        message = (
            f"Non-finite gradient {where}, refused step number {self.count} of this optimizer. No "
            "weight and no state was changed."
        )
        if raises:
            self._error = FloatingPointError(
                f"{message} Lower lr, clip gradients, or pass nonfinite='skip' to skip such steps."
            )
        else:
            warnings.warn(
                f"{message} Later ones are counted in optimizer.nonfinite_steps without a warning.",
                stacklevel=6,
            )
