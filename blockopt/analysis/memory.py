"""How much memory a matrix needs, is free or was taken, and refusals before it is taken."""

from __future__ import annotations

import math
import os

import torch

from blockopt.checks import check_count

GIB = 2**30
ALWAYS_FITS = 2**24  # bytes; to ask what is free takes longer than to fill them
NOT_COMPARED = "Memory did not suffice to compare with float64."  # a note of reports


class TooLargeError(ValueError):
    """Raised before memory is taken, if what is asked for does not fit."""


def memory_needed(rows: int, columns: int, dtype: torch.dtype, chunk: int = 128) -> int:
    """Return the bytes of a dense matrix and of `chunk` columns in work, without activations.

    Example:
        The Hessian of one fused query, key and value matrix of GPT-2 small, in GiB:

        >>> memory_needed(768 * 2304, 768 * 2304, torch.float32) // 2**30
        11666
    """
    return (rows * columns + 3 * rows * min(chunk, columns)) * dtype.itemsize


def check_memory(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    chunk: int = 1,
    max_bytes: int | None = None,
) -> None:
    """Raise `TooLargeError`, a `ValueError`, if a dense matrix does not fit into memory."""
    check_count("chunk", chunk)
    if max_bytes is not None and not max_bytes > 0:
        raise ValueError(f"Invalid max_bytes={max_bytes}. Must be > 0.")
    needed = memory_needed(rows, columns, dtype, chunk)
    if max_bytes is None and needed <= ALWAYS_FITS:
        return
    limit = free_memory(device) if max_bytes is None else max_bytes
    if limit is not None and needed > limit:
        name = str(dtype).removeprefix("torch.")
        raise TooLargeError(
            f"A dense matrix of {rows:,} x {columns:,} in {name} needs {needed / GIB:,.2f} GiB, and"
            f" {limit / GIB:,.2f} GiB are {'free' if max_bytes is None else 'allowed by max_bytes'}"
            ". Take a block, operator.block(name, index), or the functions of "
            "blockopt.analysis.spectral, which need products only, or, for attention, "
            "SelfAttentionHessian(...).factored(role)."
        )


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device, or None if the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # unlike sysconf, counts caches
            lines = [line.split() for line in file if line.startswith("MemAvailable")]
        return int(min(int(lines[0][1]) * 1024, _free_in_container()))
    except (OSError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _free_in_container() -> float:
    """Return the bytes that a Linux control group leaves, infinity without one."""
    try:
        with (
            open("/sys/fs/cgroup/memory.max", encoding="ascii") as most,
            open("/sys/fs/cgroup/memory.current", encoding="ascii") as now,
        ):
            return int(most.read()) - int(now.read())
    except (OSError, ValueError):  # the file says "max" if there is no limit
        return math.inf


def reset_peak_memory(device: torch.device) -> None:
    """Forget the peak so far, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:  # not Linux, or not allowed: the peak is that of the whole process then
        pass


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has held since the reset, 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("VmHWM")]
        return int(lines[0][1]) * 1024
    except (OSError, IndexError):
        return 0
