"""Products of a symmetric operator with vectors, checked, and the steps that Lanczos and the estimators share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from blockopt.analysis.spectral.density import SymmetricOperator


def size(operator: SymmetricOperator, check_tensor: bool = True) -> int:
    """The dimension n of an operator of shape (n, n) and a real dtype; a tensor is looked at, whether it is symmetric."""
    if not isinstance(getattr(operator, "dtype", None), torch.dtype) or not hasattr(
        operator, "shape"
    ):
        wanted = "a tensor, or have shape, a torch dtype, device and `A @ v`. torch.as_tensor makes a tensor of an array."
        raise TypeError(f"Invalid operator of type {type(operator).__name__}. Must be {wanted}")
    shape = tuple(operator.shape)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 1:
        raise ValueError(f"Invalid operator of shape {shape}. Must be (n, n) with n >= 1.")
    if not operator.dtype.is_floating_point:
        raise ValueError(
            f"Invalid operator of dtype {operator.dtype}. Must be a real floating-point one, such as torch.float64."
        )
    if isinstance(operator, Tensor) and check_tensor:
        matrix = operator.detach()
        asymmetry, largest = float((matrix - matrix.mT).abs().max()), float(matrix.abs().max())
        if asymmetry > torch.finfo(operator.dtype).eps ** 0.5 * largest:
            raise ValueError(
                f"Invalid matrix: entries differ from their mirror images by up to {asymmetry:.3g}, the largest is "
                f"{largest:.3g}. Must be symmetric: (A + A.mT) / 2 is."
            )
    return shape[0]


def product(operator: SymmetricOperator, vectors: Tensor) -> Tensor:
    """`A @ vectors` in float64, of float64 vectors (n,) or (n, k) that are rounded to the dtype of the operator.

    Raises:
        FloatingPointError: If it is not finite.
    """
    result = (operator @ vectors.to(operator.dtype)).detach()
    if result.shape != vectors.shape:
        given, wanted = tuple(result.shape), tuple(vectors.shape)
        raise ValueError(
            f"Invalid {_name(operator)}: its product with {wanted} has shape {given}. Must be {wanted}."
        )
    if not torch.isfinite(result).all():
        cure = "Check its weights and data for NaN or infinity; a float32 or float64 operator overflows later than a half one."
        raise FloatingPointError(
            f"The product of {_name(operator)} with a finite vector is not finite. {cure}"
        )
    return result.double()


def _name(operator: SymmetricOperator) -> str:
    return (
        f"the {type(operator).__name__} of shape {tuple(operator.shape)} and dtype {operator.dtype}"
    )


def random_signs(number: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """A float64 vector of independent random signs."""
    signs = torch.randint(
        0, 2, (number,), generator=generator, dtype=torch.int8, device=generator.device
    )
    return signs.to(device, torch.float64).mul_(2).sub_(1)


def random_normal(operator: SymmetricOperator, generator: torch.Generator) -> Tensor:
    """A float64 vector of n independent standard normal entries, on the device of the operator."""
    vector = torch.randn(
        operator.shape[0], generator=generator, dtype=torch.float64, device=generator.device
    )
    return vector.to(operator.device)


def unit_start(
    operator: SymmetricOperator, start: Tensor | None, generator: torch.Generator
) -> Tensor:
    """`start`, or a random vector, brought to length 1."""
    n = size(operator)
    vector = (
        random_normal(operator, generator)
        if start is None
        else start.detach().to(operator.device, torch.float64)
    )
    if vector.shape != (n,) or not 0 < float(vector.norm()) < math.inf:
        given = f"shape {tuple(vector.shape)} and norm {float(vector.norm())}"
        raise ValueError(
            f"Invalid start of {given}. Must be a vector of shape {(n,)} that is finite and not 0."
        )
    return vector.div(vector.norm())


def orthogonal_product(
    operator: SymmetricOperator, rows: Tensor, index: int
) -> tuple[Tensor, Tensor, float]:
    """`A v` of one vector of the basis: its coefficients in the basis up to `v`, the rest of it, and its length."""
    basis, rest = rows[: index + 1], product(operator, rows[index])
    length = float(rest.norm())
    coefficients = basis @ rest
    rest = rest - basis.T @ coefficients
    correction = basis @ rest  # twice is enough (Parlett, Kahan)
    return coefficients + correction, rest - basis.T @ correction, length


def remainder_norm(operator: SymmetricOperator, rest: Tensor, largest: float) -> float:
    """The length of the rest of a product, or 0 if it is rounding error."""
    length = float(rest.norm())
    return length if length > 100 * torch.finfo(operator.dtype).eps * largest else 0.0


def orthogonal_start(
    operator: SymmetricOperator, basis: Tensor, generator: torch.Generator
) -> Tensor:
    """A random unit vector orthogonal to the rows of `basis`."""
    vector = random_normal(operator, generator)
    for _ in range(3):
        vector = vector - basis.T @ (basis @ vector)
        vector = vector / vector.norm()
    return vector


def check_count(name: str, value: int, smallest: int = 1) -> None:
    """Raise `ValueError` unless `value` is an integer of at least `smallest`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
        raise ValueError(f"Invalid {name}={value}. Must be an integer >= {smallest}.")
