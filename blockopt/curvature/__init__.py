"""Curvature of the blocks, one estimator a file. Each gives `{parameter name: mean curvature of each block}`."""

from blockopt.curvature.analytic import analytic
from blockopt.curvature.directional import AlongUpdate, along_update, directional, newton
from blockopt.curvature.gauss_newton import gauss_newton
from blockopt.curvature.gradient import gradient
from blockopt.curvature.hutchinson import hutchinson
from blockopt.curvature.power_law import power_law

__all__ = [
    "AlongUpdate",
    "along_update",
    "analytic",
    "directional",
    "gauss_newton",
    "gradient",
    "hutchinson",
    "newton",
    "power_law",
]
