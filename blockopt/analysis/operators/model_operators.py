"""The Hessian of a model and its two parts as operators `A @ v`, for all parameters or blocks.

The loss Hessian splits as `H = G + F`: `G = Jᵀ Λ J`, the Gauss-Newton or outer-product part, with
the Jacobian J of the predictions and the Hessian Λ of the loss in them, and `F = Σ r ∇²f`, the
functional part, with the predictions f and the derivative r of the loss by them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockopt.analysis.operators.base import Linear, ModelOperator
from blockopt.measure.closures import Evaluation
from blockopt.measure.loss_curvature import CaptureLosses, LossCurvature


class HessianOperator(ModelOperator):
    """The Hessian H of any loss: exact products by a second backward pass.

    Attention runs on the math kernel, the only one with second derivatives, and compiled models run
    eagerly. Products are reverse over reverse, unlike `torch.func.hessian` and `jvp` of `jacrev`,
    which give wrong numbers for LayerNorm with a weight, without an error (torch 2.13; `jacfwd` of
    `grad` is right). Arguments are those of `ModelOperator`.

    Example:
        The loss `(3 w1 + 4 w2)²`:

        >>> from torch import nn
        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> H = HessianOperator(model, lambda: model(x).square().sum())
        >>> H @ torch.tensor([1.0, 0.0])
        tensor([18., 24.])
    """

    def _linearize(self, evaluation: Evaluation, parameters: list[Tensor]) -> Linear:
        return self._second_derivative(evaluation(), parameters)


class GaussNewtonOperator(ModelOperator):
    """The Gauss-Newton matrix `G = Jᵀ Λ J`, the outer-product part of the Hessian.

    Λ is the Hessian of the loss in the predictions, in closed form: the loss must call
    `F.cross_entropy`, `F.mse_loss` or `F.binary_cross_entropy_with_logits`, with any of their
    options. No matrix of vocabulary times vocabulary is built. Other terms of the loss have no part
    in G: they belong to `FunctionalOperator`, with a warning if they exceed 1 %. Arguments are
    those of `ModelOperator`.

    Example:
        The squared error of one output, `(3 w1 + 4 w2)²`. The output is linear in the weights, so G
        is the Hessian:

        >>> from torch import nn
        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> zero = torch.zeros(1, 1)
        >>> G = GaussNewtonOperator(model, lambda: nn.functional.mse_loss(model(x), zero))
        >>> G @ torch.tensor([1.0, 0.0])
        tensor([18., 24.])
    """

    def _linearize(self, evaluation: Evaluation, parameters: list[Tensor]) -> Linear:
        with CaptureLosses() as seen:
            loss = evaluation()
        curvature = LossCurvature(loss, seen.calls)
        predictions = curvature.predictions
        # Jᵀ u is linear in u, so that its derivative by u along v is J v, at any u.
        duals = [torch.zeros_like(prediction, requires_grad=True) for prediction in predictions]
        options = {"create_graph": True, "materialize_grads": True}
        backward = torch.autograd.grad(predictions, parameters, duals, **options)  # type: ignore[arg-type]

        def apply(vectors: list[Tensor]) -> list[Tensor]:
            forward = self._pull(backward, duals, vectors)
            return self._pull(predictions, parameters, torch.vmap(curvature.product)(forward))

        return apply


class FunctionalOperator(ModelOperator):
    """The functional part `F = H - G = Σ r ∇²f` of the Hessian.

    It is one second derivative of the loss with its cross-entropy or squared error made linear in
    the predictions f. The difference of two products would lose all digits where F is far smaller
    than H. Arguments are those of `ModelOperator`, and losses those of `GaussNewtonOperator`.

    Example:
        The loss `(w1 w2)²` at w = (1, 2), with the Hessian ((8, 8), (8, 2)) and the Gauss-Newton
        matrix ((8, 4), (4, 2)):

        >>> from torch import nn
        >>> model = nn.ParameterList([torch.tensor(1.0), torch.tensor(2.0)])
        >>> zero = torch.tensor(0.0)
        >>> F = FunctionalOperator(model, lambda: nn.functional.mse_loss(model[0] * model[1], zero))
        >>> F @ torch.eye(2)
        tensor([[0., 4.],
                [4., 0.]])
    """

    def _linearize(self, evaluation: Evaluation, parameters: list[Tensor]) -> Linear:
        with CaptureLosses() as seen:
            loss = evaluation()
        residual = LossCurvature(loss, seen.calls).residual()
        return self._second_derivative(loss + residual, parameters)
