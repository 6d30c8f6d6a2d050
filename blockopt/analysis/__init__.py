"""Exact Hessians of transformers: closed forms, operators on any model, spectra, and how the blocks differ.

Closed forms: `SelfAttentionHessian`, `Normalization`, `FeedForwardHessian`, `TransformerBlockHessian`, `ScalarAttention`. Any
model: `HessianOperator`, `GaussNewtonOperator`, `FunctionalOperator`, `dense`, and all that takes an operator: `lanczos`,
`spectral_density`, `top_eigenpairs`, `trace`, `squared_frobenius`, `block_mass`, `measure_blocks`. Plots are in
`blockopt.analysis.plots`, which needs matplotlib.
"""

from blockopt.analysis.attention_map import AttentionMap
from blockopt.analysis.attention_moments import attention_moment
from blockopt.analysis.block_mass import block_mass, off_diagonal_mass
from blockopt.analysis.block_table import block_table, measure_blocks
from blockopt.analysis.dense import dense, dense_block
from blockopt.analysis.eigenpairs import top_eigenpairs
from blockopt.analysis.feed_forward import FeedForwardHessian, LinearNetworkHessian
from blockopt.analysis.growth import fit_exponent, growth
from blockopt.analysis.heterogeneity import jensen_shannon, negative_share, norm_spread
from blockopt.analysis.kronecker_sum import KroneckerSum
from blockopt.analysis.normalization import Normalization
from blockopt.analysis.operator import FunctionalOperator, GaussNewtonOperator, HessianOperator
from blockopt.analysis.output_loss import CrossEntropy, SquaredError
from blockopt.analysis.positionwise_loss import PositionwiseLoss
from blockopt.analysis.report import hessian_report
from blockopt.analysis.scalar_attention import ScalarAttention
from blockopt.analysis.self_attention import SelfAttentionHessian
from blockopt.analysis.spectrum import check_symmetric, lanczos, spectral_density
from blockopt.analysis.taylor import loss_difference, sample_bound, sample_differences
from blockopt.analysis.trace import diagonal, squared_frobenius, trace
from blockopt.analysis.transformer import TransformerBlockHessian
from blockopt.analysis.transformer_bounds import attention_bounds, bound_table, transformer_bounds

__all__ = [
    "AttentionMap",
    "CrossEntropy",
    "FeedForwardHessian",
    "FunctionalOperator",
    "GaussNewtonOperator",
    "HessianOperator",
    "KroneckerSum",
    "LinearNetworkHessian",
    "Normalization",
    "PositionwiseLoss",
    "ScalarAttention",
    "SelfAttentionHessian",
    "SquaredError",
    "TransformerBlockHessian",
    "attention_bounds",
    "attention_moment",
    "block_mass",
    "block_table",
    "bound_table",
    "check_symmetric",
    "dense",
    "dense_block",
    "diagonal",
    "fit_exponent",
    "growth",
    "hessian_report",
    "jensen_shannon",
    "lanczos",
    "loss_difference",
    "measure_blocks",
    "negative_share",
    "norm_spread",
    "off_diagonal_mass",
    "sample_bound",
    "sample_differences",
    "spectral_density",
    "squared_frobenius",
    "top_eigenpairs",
    "trace",
    "transformer_bounds",
]
