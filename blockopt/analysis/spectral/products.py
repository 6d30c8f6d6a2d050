"""Symmetric operators `A @ v`: what they must offer, checked products, and the steps of Lanczos."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor


class SymmetricOperator(Protocol):
    """A real symmetric matrix known by its products with vectors (n,) or columns (n, k).

    A square tensor is one.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, n)."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the vectors that it takes and returns."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the vectors that it takes and returns."""
        ...

    def __matmul__(self, other: Tensor, /) -> Tensor: ...


def size(operator: SymmetricOperator, check_tensor: bool = True) -> int:
    """Return the dimension n of an operator after checking its shape and dtype.

    A tensor is also checked for symmetry, unless `check_tensor` is False.
    """
    if not isinstance(getattr(operator, "dtype", None), torch.dtype) or not hasattr(
        operator, "shape"
    ):
        raise TypeError(
            f"Invalid operator of type {type(operator).__name__}. Must be a tensor, or have shape, "
            "a torch dtype, device and `A @ v`. torch.as_tensor makes a tensor of an array."
        )
    shape = tuple(operator.shape)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise ValueError(f"Invalid operator of shape {shape}. Must be (n, n) with n >= 1.")
    if not operator.dtype.is_floating_point:
        raise ValueError(
            f"Invalid operator of dtype {operator.dtype}. Must be a real floating-point one, such "
            "as torch.float64."
        )
    if isinstance(operator, Tensor) and check_tensor:
        matrix = operator.detach()
        asymmetry, largest = float((matrix - matrix.mT).abs().max()), float(matrix.abs().max())
        if asymmetry > torch.finfo(operator.dtype).eps ** 0.5 * largest:
            raise ValueError(
                f"Invalid matrix: entries differ from their mirror images by up to {asymmetry:.3g}"
                f", the largest is {largest:.3g}. Must be symmetric: (A + A.mT) / 2 is."
            )
    return shape[0]


def product(operator: SymmetricOperator, vectors: Tensor) -> Tensor:
    """Return `A @ vectors` in float64 for float64 vectors (n,) or (n, k).

    The vectors are rounded to the dtype of the operator first.

    Raises:
        FloatingPointError: If the product is not finite.
    """
    result = (operator @ vectors.to(operator.dtype)).detach()
    if result.shape != vectors.shape:
        given, wanted = tuple(result.shape), tuple(vectors.shape)
        raise ValueError(
            f"Invalid {_name(operator)}: its product with {wanted} has shape {given}. "
            f"Must be {wanted}."
        )
    if not torch.isfinite(result).all():
        raise FloatingPointError(
            f"The product of {_name(operator)} with a finite vector is not finite. Check its "
            "weights and data for NaN or infinity; float32 and float64 overflow later than half "
            "precision."
        )
    return result.double()


def _name(operator: SymmetricOperator) -> str:
    kind, shape = type(operator).__name__, tuple(operator.shape)
    return f"the {kind} of shape {shape} and dtype {operator.dtype}"


def random_signs(number: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Return a float64 vector of independent random signs."""
    signs = torch.randint(
        0, 2, (number,), generator=generator, dtype=torch.int8, device=generator.device
    )
    return signs.to(device, torch.float64).mul_(2).sub_(1)


def sign_columns(n: int, number: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Return `number` columns of random signs, (n, number)."""
    return torch.stack([random_signs(n, device, generator) for _ in range(number)], dim=1)


def random_normal(operator: SymmetricOperator, generator: torch.Generator) -> Tensor:
    """Return a float64 vector of n standard normal entries on the device of the operator."""
    vector = torch.randn(
        operator.shape[0], generator=generator, dtype=torch.float64, device=generator.device
    )
    return vector.to(operator.device)


def unit_start(
    operator: SymmetricOperator, start: Tensor | None, generator: torch.Generator
) -> Tensor:
    """Return `start`, or a random vector, scaled to length 1."""
    n = size(operator)
    if start is None:
        start = random_normal(operator, generator)
    vector = start.detach().to(operator.device, torch.float64)
    if vector.shape != (n,) or not 0 < float(vector.norm()) < math.inf:
        given = f"shape {tuple(vector.shape)} and norm {float(vector.norm())}"
        raise ValueError(
            f"Invalid start of {given}. Must be a vector of shape {(n,)} that is finite and not 0."
        )
    return vector.div(vector.norm())


def orthogonal_product(
    operator: SymmetricOperator, rows: Tensor, index: int
) -> tuple[Tensor, Tensor, float]:
    """Multiply one basis vector v by A.

    Returns:
        The coefficients of `A v` in the basis up to v, what is orthogonal to it, and `‖A v‖`.
    """
    basis, rest = rows[: index + 1], product(operator, rows[index])
    length = float(rest.norm())
    coefficients = basis @ rest
    rest = rest - basis.T @ coefficients
    correction = basis @ rest  # twice is enough (Parlett, Kahan)
    return coefficients + correction, rest - basis.T @ correction, length


def remainder_norm(operator: SymmetricOperator, rest: Tensor, largest: float) -> float:
    """Return the norm of what is left of a product, or 0 if it is rounding error."""
    length = float(rest.norm())
    return length if length > 100 * torch.finfo(operator.dtype).eps * largest else 0.0


def orthogonal_start(
    operator: SymmetricOperator, basis: Tensor, generator: torch.Generator
) -> Tensor:
    """Return a random unit vector that is orthogonal to the rows of `basis`."""
    vector = random_normal(operator, generator)
    for _ in range(3):
        vector = vector - basis.T @ (basis @ vector)
        vector = vector / vector.norm()
    return vector
