"""Steps that are recorded once and replayed with other numbers: `torch.compile`, CUDA graphs."""

from __future__ import annotations

import torch


def is_recorded() -> bool:
    """Whether this step is being recorded, so that it must not depend on what numbers are now."""
    return torch.compiler.is_compiling() or is_captured()


def is_captured() -> bool:
    """Whether this step becomes part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
