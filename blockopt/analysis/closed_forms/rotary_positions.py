"""Rotary positions (RoPE): queries and keys turned by angles that grow with their position.

A head of width dk falls into planes. At position i, plane f is turned by the angle `i θ_f`, so the
score of i and j sees positions only through `i - j`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.checks import check_tensors
from blockopt.checks import check_choice

PlaneLayout = Literal["half", "interleaved"]


class RotaryPositions:
    """The rotations `R_i` of all positions i.

    Args:
        cos: Cosines of the angles by position and entry of the head, (L, r) or (B, L, r), as models
            of transformers pass them to attention. With r below the width of a head, its last
            entries are not turned. A factor that scales both, as YaRN has it, is fine. The angles
            of the planes may be stored one half after the other or each twice in a row.
        sin: The sines, of the same shape.
        layout: Which two entries form a plane: "half" for f and f + r/2, as in Llama and most
            models, or "interleaved" for 2f and 2f + 1, as in GPT-J, Cohere, GLM and Ernie 4.5.

    Attributes:
        cos: (B, L, r) or (1, L, r), for each entry its own.
        sin: Of the same shape.
        given: Both by name, in the order in which they were passed.

    Raises:
        ValueError: If shapes do not fit, or the two entries of a plane have different angles.

    Example:
        >>> quarter = RotaryPositions(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]]))
        >>> quarter.rotate(torch.tensor([[[1.0, 0.0]]]))
        tensor([[[0., 1.]]])
    """

    def __init__(self, cos: Tensor, sin: Tensor, *, layout: PlaneLayout = "half") -> None:
        check_choice("layout", layout, get_args(PlaneLayout))
        check_tensors({"cos": cos, "sin": sin})
        if cos.shape != sin.shape or cos.ndim not in (2, 3) or cos.shape[-1] % 2:
            raise ValueError(
                f"Invalid cos of shape {tuple(cos.shape)} and sin of shape {tuple(sin.shape)}. "
                "Both must be (L, r) or (B, L, r), with r even."
            )
        self._layout = layout
        self.width = cos.shape[-1]
        as_given = (t.detach().reshape(-1, *t.shape[-2:]) for t in (cos, sin))
        self.given = dict(zip(("cos", "sin"), as_given))
        self.cos, self.sin = (self._by_entry(*named) for named in self.given.items())

    @classmethod
    def of_length(
        cls,
        length: int,
        width: int,
        *,
        base: float = 10_000.0,
        layout: PlaneLayout = "half",
        dtype: torch.dtype = torch.float64,
    ) -> RotaryPositions:
        """Return the usual rotations of positions 0 to length - 1, `θ_f = base^(-2f / width)`."""
        if width < 2 or width % 2:
            raise ValueError(f"Invalid width={width}. Must be an even number >= 2.")
        frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * frequencies
        both = torch.cat([angles, angles], 1)
        if layout == "interleaved":
            both = angles.repeat_interleave(2, 1)
        return cls(both.cos().to(dtype), both.sin().to(dtype), layout=layout)

    def rotate(self, v: Tensor) -> Tensor:
        """Return `R_i v_i` for v of shape (B, L, dk)."""
        turned, rest = v[..., : self.width], v[..., self.width :]
        first, second = self._planes(turned)
        quarter = self._joined(-second, first)
        return torch.cat([turned * self.cos + quarter * self.sin, rest], -1)

    def matrices(self, width: int) -> Tensor:
        """Return `R_i`, (B or 1, L, dk, dk)."""
        identity = torch.eye(width, dtype=self.cos.dtype, device=self.cos.device)
        shape = (*self.cos.shape[:2], width)
        columns = [self.rotate(column.expand(shape)) for column in identity]
        return torch.stack(columns, -1)

    def check(self, X: Tensor, key_width: int) -> None:
        """Raise `ValueError` unless these are rotations for tokens X (B, L, d) and heads of dk."""
        batch, length = X.shape[:2]
        if self.cos.shape[0] not in (1, batch) or self.cos.shape[1] != length:
            given = tuple(self.cos.shape)
            raise ValueError(
                f"Invalid rotary: angles of shape {given}. Must be one per position, "
                f"({length}, r) or ({batch}, {length}, r)."
            )
        if self.width > key_width:
            raise ValueError(
                f"Invalid rotary: it turns {self.width} entries of heads that have {key_width}."
            )
        if (self.cos.dtype, self.cos.device) != (X.dtype, X.device):
            kind = f"{self.cos.dtype} on {self.cos.device}"
            raise ValueError(
                f"Invalid rotary: angles of {kind}. Must be as X, of {X.dtype} on {X.device}: "
                "RotaryPositions(cos.to(X), sin.to(X))."
            )

    def _by_entry(self, name: str, values: Tensor) -> Tensor:
        """Return what turns each entry, from values in either order."""
        if torch.equal(*self._planes(values)):
            return values
        first, second = values.chunk(2, -1)
        if self._layout == "interleaved" and torch.equal(first, second):
            return first.repeat_interleave(2, -1)  # as GLM does in its layers
        ask = " Is the layout 'interleaved'?" if self._layout == "half" else ""
        raise ValueError(
            f"Invalid {name} for layout={self._layout!r}: the two entries of a plane have "
            f"different angles.{ask}"
        )

    def _planes(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the second entry of every plane."""
        if self._layout == "half":
            half = self.width // 2
            return v[..., :half], v[..., half:]
        return v[..., 0::2], v[..., 1::2]

    def _joined(self, first: Tensor, second: Tensor) -> Tensor:
        if self._layout == "half":
            return torch.cat([first, second], -1)
        return torch.stack([first, second], -1).flatten(-2)
