"""Curvature from closed forms."""

from blockopt.curvature.analytic.estimator import analytic

__all__ = ["analytic"]
