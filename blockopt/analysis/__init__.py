"""Exact Hessians of transformers: closed forms, operators on any model, and their spectra.

`hessian_report` measures a whole model, `sampled_report` a large one, and `kronecker_report` how
well KFAC and EKFAC match it. Operators on any model:
`HessianOperator`, `GaussNewtonOperator`, `FunctionalOperator`, `dense`. Functions of any operator:
`lanczos`, `spectral_density`, `top_eigenpairs`, `trace`, `squared_frobenius`, `block_mass`,
`measure_block`. Closed forms: `SelfAttentionHessian`, `Normalization`, `FeedForwardHessian`,
`TransformerBlockHessian`, `ScalarAttention`. Plots are in `blockopt.analysis.plots`, which needs
matplotlib. The guide is README.md in this folder.
"""

from blockopt.analysis.block_report import Probes, measure_block
from blockopt.analysis.closed_forms.attention_input import lookup_rows
from blockopt.analysis.closed_forms.attention_map import AttentionMap
from blockopt.analysis.closed_forms.attention_module import attention_hessian
from blockopt.analysis.closed_forms.attention_moments import attention_moment
from blockopt.analysis.closed_forms.exponents import fit_exponent
from blockopt.analysis.closed_forms.feed_forward import FeedForwardHessian
from blockopt.analysis.closed_forms.growth import growth
from blockopt.analysis.closed_forms.kronecker_sum import KroneckerSum
from blockopt.analysis.closed_forms.linear_network import LinearNetworkHessian
from blockopt.analysis.closed_forms.normalization import Normalization
from blockopt.analysis.closed_forms.output_loss import CrossEntropy, SquaredError
from blockopt.analysis.closed_forms.positionwise_loss import PositionwiseLoss
from blockopt.analysis.closed_forms.rotary_positions import RotaryPositions
from blockopt.analysis.closed_forms.scalar_attention import ScalarAttention
from blockopt.analysis.closed_forms.score_vectors import HeadNorm
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from blockopt.analysis.closed_forms.stacked_blocks import (
    INPUT,
    LayerWeight,
    StackedBlocksHessian,
)
from blockopt.analysis.closed_forms.transformer_block import TransformerBlockHessian
from blockopt.analysis.closed_forms.transformer_bounds import (
    attention_bounds,
    bound_table,
    transformer_bounds,
)
from blockopt.analysis.kronecker.report import kronecker_report
from blockopt.analysis.operators.dense import dense, dense_block
from blockopt.analysis.operators.model_operators import (
    FunctionalOperator,
    GaussNewtonOperator,
    HessianOperator,
)
from blockopt.analysis.report import hessian_report
from blockopt.analysis.report_from_samples import sampled_report
from blockopt.analysis.spectral.block_mass import block_mass
from blockopt.analysis.spectral.density import check_symmetric, lanczos, spectral_density
from blockopt.analysis.spectral.eigenpairs import top_eigenpairs
from blockopt.analysis.spectral.heterogeneity import jensen_shannon, negative_share, norm_spread
from blockopt.analysis.spectral.trace import diagonal, squared_frobenius, trace
from blockopt.analysis.taylor import loss_difference, sample_bound, sample_differences

__all__ = [
    "INPUT",
    "AttentionMap",
    "CrossEntropy",
    "FeedForwardHessian",
    "FunctionalOperator",
    "GaussNewtonOperator",
    "HeadNorm",
    "HessianOperator",
    "KroneckerSum",
    "LayerWeight",
    "LinearNetworkHessian",
    "Normalization",
    "PositionwiseLoss",
    "Probes",
    "RotaryPositions",
    "ScalarAttention",
    "SelfAttentionHessian",
    "SquaredError",
    "StackedBlocksHessian",
    "TransformerBlockHessian",
    "attention_bounds",
    "attention_hessian",
    "attention_moment",
    "block_mass",
    "bound_table",
    "check_symmetric",
    "dense",
    "dense_block",
    "diagonal",
    "fit_exponent",
    "growth",
    "hessian_report",
    "jensen_shannon",
    "kronecker_report",
    "lanczos",
    "lookup_rows",
    "loss_difference",
    "measure_block",
    "negative_share",
    "norm_spread",
    "sample_bound",
    "sample_differences",
    "sampled_report",
    "spectral_density",
    "squared_frobenius",
    "top_eigenpairs",
    "trace",
    "transformer_bounds",
]
