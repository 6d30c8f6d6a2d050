"""The exact Hessian of the loss of a whole transformer block: attention, MLP, residuals and norms.

The block is a chain of four sites. X is the input, N a norm, F attention, M the MLP:

    pre-norm (GPT-2, Llama)                     post-norm (Vaswani et al.; arXiv 2510.16927)
    R = X + F(N(X))      attention              R = X + F(X)
    Y = N(R)             middle norm            Y = N(R)
    S = R + M(Y)         MLP                    S = Y + M(Y)
    Z = N(S)             final norm             Z = N(S)

By the chain rule, the Hessian of ℓ(Z) is one outer product of Jacobians and, for each site, its own
second derivative, contracted with the gradient at its output, between the Jacobians of what enters
it:

    H = J_Zᵀ ∇²ℓ J_Z  +  Σ_sites J_inᵀ (Σ_o g_o ∂²site_o) J_in
        outer            functional

where "what enters" a site is its input, through J_in, and its own weights. Only Jacobians and
contracted Hessians are built, no tensor of three indices. Every term is block-diagonal in the
tokens, except for those of attention.

Theorem 5 of Petrov et al. (arXiv 2510.16927) is this for one head, post-norm, ReLU and the squared
error, before contraction: H_tr(i,j) = (J_Z ⊗ I) ξ_ij + (I ⊗ B_iᵀ) H_Z B_j with B_i = ∂S/∂W_i and
ξ_ij = ∂B_i/∂W_j. It is right, but some of its pieces are not as printed (1 is `mlp_in`, 2
`mlp_out`, k an attention weight; D the mask of active units, m the width of the MLP):

    ξ_12  printed: what is ξ_21. Correct:
          (I ⊗ (Y ⊗ I_m)ᵀ D)(I_L ⊗ K_{d,L} ⊗ I_m)(vec I_L ⊗ I_{dm}) K_{d,m}
    ξ_21  printed: of wrong size. Correct: the formula printed as ξ_12
    ξ_1k  ends in ⊗ I_{n_1}, not ⊗ I_{n_k}
    Φ_kl  = ∂²F has no factor 2/(L d), which Φ_QQ, Φ_VQ and Φ_QK keep
    D     is of Y W_1 > 0, not of X > 0 as in the proof of Theorem 4
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.activations import Activation
from blockopt.analysis.closed_forms.biased_attention import (
    ATTENTION_ROLES,
    FIRST_ROLES,
    BiasedAttention,
)
from blockopt.analysis.closed_forms.checks import Part, check_part, check_tensors
from blockopt.analysis.closed_forms.factored_block import FactoredBlock
from blockopt.analysis.closed_forms.feed_forward import (
    MLP_ROLES,
    FeedForwardHessian,
    FeedForwardMap,
)
from blockopt.analysis.closed_forms.normalization import Normalization, NormKind
from blockopt.analysis.closed_forms.output_loss import OutputLoss
from blockopt.analysis.closed_forms.rotary_positions import RotaryPositions
from blockopt.analysis.closed_forms.score_vectors import HeadNorm
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from blockopt.analysis.closed_forms.transformer_sites import (
    InputSite,
    KnownLoss,
    NormSite,
    between,
    local_hessian,
    pull,
    push,
)
from blockopt.analysis.memory import check_memory
from blockopt.checks import check_choice

Arrangement = Literal["pre", "post"]
NORM_ROLES = (*FIRST_ROLES, "middle_gain", "middle_bias", "final_gain", "final_bias")
REQUIRED = ("query", "key", "value", "mlp_in", "mlp_out")


class TransformerBlockHessian:
    """Every pair of weights of a transformer block: `H = H_o + H_f` in closed form.

    `block` and `dense` are for small sizes: they build Jacobians of B·L·d rows and as many columns
    as a weight has entries. `factored` has the diagonal blocks of larger ones, and
    `HessianOperator` products with the whole Hessian of any model.

    Args:
        X: Tokens that enter the block, (L, d) or (B, L, d).
        weights: By role, each as used on the right of its input, and as a vector in row-major
            order. Attention: "query", "key", "value" (d, dk) or (H, d, dk), where heads may share
            keys and values in G groups, (G, d, dk); optionally "output" (dk, d) or (H, dk, d),
            without which the heads' values are added, "query_bias", "key_bias", "value_bias" (dk,)
            or (H, dk), "output_bias" (d,). MLP: "mlp_in" (d, m),
            "mlp_out" (m, d); optionally "mlp_gate" (d, m), "mlp_in_bias" (m,), "mlp_out_bias" (d,).
            Norms, all optional: "first_gain", "first_bias" (before attention, in pre-norm),
            "middle_gain", "middle_bias", "final_gain", "final_bias", each (d,).
        loss: `SquaredError(target)` or `CrossEntropy(W, targets)` on Z.
        arrangement: "pre" or "post"; see above.
        norm: "layer", "rms" or None for no norms at all.
        final_norm: Whether there is a norm at the end. GPT-2 has it only after its last block.
        activation: The activation of the MLP, or of its gate: "relu", "gelu", "gelu_tanh", "silu",
            "identity".
        epsilon: The ε of all norms.
        mask: The mask of attention, bool (True: seen) or added to the scores, (L, L) or (B, L, L).
        scale: The factor of the scores, 1/sqrt(dk) by default.
        rotary: Rotations of queries and keys by their positions.
        norms: Norms of "query" and "key"; their gains are constants here.

    Attributes:
        roles: The weights, in the order of `dense`.
        output: Z, (B, L, d).

    Raises:
        ValueError: If a weight is missing, unknown or of a wrong shape, or an option is.

    Example:
        >>> from blockopt.analysis.closed_forms.output_loss import SquaredError
        >>> X, I = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 1.0]]), torch.eye(3)
        >>> weights = {"query": I, "key": I, "value": I, "mlp_in": I, "mlp_out": I}
        >>> loss = SquaredError(torch.zeros(2, 3))
        >>> hessian = TransformerBlockHessian(X, weights, loss, activation="relu")
        >>> hessian.dense().shape
        torch.Size([45, 45])
        >>> bool(hessian.block("mlp_in", "value").abs().max() > 0)
        True
    """

    def __init__(
        self,
        X: Tensor,
        weights: Mapping[str, Tensor],
        loss: OutputLoss,
        *,
        arrangement: Arrangement = "pre",
        norm: NormKind | None = "layer",
        final_norm: bool = True,
        activation: Activation = "gelu",
        epsilon: float = 1e-5,
        mask: Tensor | None = None,
        scale: float | None = None,
        rotary: RotaryPositions | None = None,
        norms: Mapping[str, HeadNorm] | None = None,
    ) -> None:
        check_choice("arrangement", arrangement, get_args(Arrangement))
        check_choice("norm", norm, (*get_args(NormKind), None))
        if X.ndim not in (2, 3):
            raise ValueError(f"Invalid X of shape {tuple(X.shape)}. Must be (L, d) or (B, L, d).")
        _check_weights(weights, arrangement, norm, final_norm)
        check_tensors({"X": X, **weights})
        weights = {role: weight.detach() for role, weight in weights.items()}
        X = X.detach() if X.ndim == 3 else X.detach().unsqueeze(0)
        self._pre, first = arrangement == "pre", X
        self._first = Normalization(X, kind=norm, epsilon=epsilon) if norm and self._pre else None
        first = X if self._first is None else self._first.output
        # The gain and bias of that norm are among the weights of attention.
        self._scores: dict[str, Any] = {
            "mask": mask,
            "scale": scale,
            "rotary": rotary,
            "norms": norms,
        }
        self.attention = BiasedAttention(first, weights, **self._scores)
        self._input = InputSite(self._first, self.attention)
        self._entering = weights.get("first_gain", 1) * first + weights.get("first_bias", 0)
        self._weights = weights
        _check_width("Attention", self.attention.output, X, "value and output")
        residual = X + self.attention.output  # R
        self._middle = NormSite(residual, norm, "middle", weights, epsilon) if norm else None
        middle = residual if self._middle is None else self._middle.output  # Y
        self._mlp = FeedForwardMap(
            *(middle, weights["mlp_in"], weights["mlp_out"]),
            W_gate=weights.get("mlp_gate"),
            b_in=weights.get("mlp_in_bias"),
            b_out=weights.get("mlp_out_bias"),
            activation=activation,
        )
        _check_width("The MLP", self._mlp.output, X, "mlp_out")
        summed = (residual if self._pre else middle) + self._mlp.output  # S
        self._final = None
        if norm and final_norm:
            self._final = NormSite(summed, norm, "final", weights, epsilon)
        self.output = summed if self._final is None else self._final.output  # Z
        every = (*ATTENTION_ROLES, *MLP_ROLES, *NORM_ROLES)
        self.roles = tuple(role for role in every if role in weights)
        self.sizes = {role: weights[role].numel() for role in self.roles}
        self._input_size = X.numel()
        self.loss = loss
        # The gradient at the output of each site, from the last to the first
        self.gradient_of_output = loss.gradient(self.output)
        self._at_sum = pull(self._final, self.gradient_of_output)
        from_mlp = pull(self._mlp, self._at_sum)
        self._at_middle = from_mlp if self._pre else from_mlp + self._at_sum
        at_residual = pull(self._middle, self._at_middle)
        self._at_residual = at_residual + self._at_sum if self._pre else at_residual
        self._reached: dict[str, tuple[Tensor | None, ...]] = {}
        self._kept: tuple[Part, Tensor] | None = None

    def value(self) -> Tensor:
        """Return the loss."""
        return self.loss.value(self.output)

    def jacobian(self, role: str) -> Tensor:
        """Return ∂Z/∂weight, (B·L·d, n), or ∂Z/∂X for the role "input"."""
        final = self._reach(role)[-1]
        assert final is not None
        return final

    def block(self, row: str, column: str, part: Part = "full") -> Tensor:
        """Return ∂²loss/∂row∂column, (n_row, n_column), or one of its parts.

        Besides the weights there is the role "input", all entries of X.
        """
        check_part(part)
        Z = self.output
        for role in {row, column} & {*self.sizes, "input"}:  # the Jacobian exceeds the block
            check_memory(Z.numel(), self._size(role), Z.dtype, Z.device)
        if part == "outer":
            return self._outer(row, column)
        functional = self._functional(row, column)
        return functional if part == "functional" else functional + self._outer(row, column)

    def dense(self, part: Part = "full") -> Tensor:
        """Return the whole matrix, in the order of `roles`."""
        ends = list(accumulate(self.sizes.values()))
        check_memory(ends[-1], ends[-1], self.output.dtype, self.output.device)
        places = {role: slice(end - self.sizes[role], end) for role, end in zip(self.roles, ends)}
        whole = self.output.new_empty(ends[-1], ends[-1])
        for number, row in enumerate(self.roles):
            for column in self.roles[number:]:
                block = self.block(row, column, part)
                whole[places[column], places[row]] = block.mT
                whole[places[row], places[column]] = block
        return whole

    def factored(self, role: str, head: int = 0, part: Part = "full") -> FactoredBlock:
        """Return a diagonal block as Σ_i a_i a_iᵀ ⊗ E_i, an operator that is never built.

        Above attention no token acts on another. So to attention, and to the MLP, the rest of the
        block is a loss with one Hessian K_i (d, d) for each token, and `SelfAttentionHessian` and
        `FeedForwardHessian` have the factored form. It takes memory for B·L matrices d × d.

        Args:
            role: "query", "key", "value" or "output" of one head, or a weight or bias of the MLP.
            head: The number of the head, for a role of attention.
            part: "outer", "functional" or "full".

        Raises:
            ValueError: For the role of a norm or a bias of attention.
        """
        check_part(part)
        # The second derivatives of attention and MLP are functional.
        inner: Part = "outer" if part == "outer" else "full"
        if role in self._mlp.roles:
            curvature = self._curvature_at_sum(part).unflatten(0, self.output.shape[:-1])
            loss = KnownLoss(self.value(), self._at_sum, curvature)
            return FeedForwardHessian(self._mlp, loss).factored(role, inner)
        if role not in ("query", "key", "value", "output") or role not in self.sizes:
            raise ValueError(
                f"Invalid role {role!r}. Must be a weight of attention or of the MLP; use `block` "
                "for the others."
            )
        curvature = self._curvature_at_residual(part).unflatten(0, self.output.shape[:-1])
        loss = KnownLoss(self.value(), self._at_residual, curvature)
        w = self._weights
        biases = {name: w.get(f"{name}_bias") for name in ("query", "key", "value")}
        attention = SelfAttentionHessian(
            *(self._entering, w["query"], w["key"], w["value"]),
            loss=loss,
            W_U=w.get("output"),
            **self._scores,
            biases={name: bias for name, bias in biases.items() if bias is not None},
        )
        return attention.factored(role, head, inner)

    def _curvature_at_sum(self, part: Part) -> Tensor:
        """Return ∂²loss/∂S² of each token, (N, d, d), or one of its parts."""
        curvature = self.loss.curvature(self.output).flatten(0, -3)
        if self._final is None:
            return torch.zeros_like(curvature) if part == "functional" else curvature
        jacobian = self._final.input_jacobian()
        functional = self._final.input_hessian(self.gradient_of_output)
        outer = jacobian.mT @ curvature @ jacobian
        return {"outer": outer, "functional": functional, "full": outer + functional}[part]

    def _curvature_at_residual(self, part: Part) -> Tensor:
        """Return ∂²loss/∂R² of each token, (N, d, d), or a part; kept for the next role."""
        if self._kept is None or self._kept[0] != part:
            self._kept = (part, self._new_curvature_at_residual(part))
        return self._kept[1]

    def _new_curvature_at_residual(self, part: Part) -> Tensor:
        Z = self.output
        identity = torch.eye(Z.shape[-1], dtype=Z.dtype, device=Z.device)
        if self._middle is None:
            middle = identity.expand(Z.shape[:-1].numel(), -1, -1)
        else:
            middle = self._middle.input_jacobian()
        summed = self._mlp.input_jacobian() @ middle + (identity if self._pre else middle)  # ∂S/∂R
        total = summed.mT @ self._curvature_at_sum(part) @ summed
        if part == "outer":
            return total
        total = total + middle.mT @ self._mlp.input_hessian(self._at_sum) @ middle
        if self._middle is None:
            return total
        return total + self._middle.input_hessian(self._at_middle)

    def _reach(self, role: str) -> tuple[Tensor | None, ...]:
        """Return the Jacobians of R, Y, S and Z by a weight, (B·L·d, n); None for no dependence."""
        check_choice("role", role, (*self.roles, "input"))
        if role not in self._reached:
            residual = None
            if role == "input":
                residual = self._input.jacobian()
            elif role in self.attention.roles:
                residual = self.attention.jacobian(role)
            middle = push(self._middle, role, residual)
            past = residual if self._pre else middle
            through = push(self._mlp, role, middle)
            summed = through if past is None else past if through is None else past + through
            self._reached[role] = (residual, middle, summed, push(self._final, role, summed))
        return self._reached[role]

    def _size(self, role: str) -> int:
        return self._input_size if role == "input" else self.sizes[role]

    def _outer(self, row: str, column: str) -> Tensor:
        """Return J_Zᵀ Λ J_Z."""
        curvature = self.loss.curvature(self.output).flatten(0, -3)
        return between(self.jacobian(row), curvature, self.jacobian(column))

    def _functional(self, row: str, column: str) -> Tensor:
        """Return the sum over the sites of each one's own second derivative."""
        rows, columns = self._reach(row), self._reach(column)
        total = self.output.new_zeros(self._size(row), self._size(column))
        if row in self.attention.roles and column in self.attention.roles:
            total = total + self.attention.functional(row, column, self._at_residual)
        if row == "input" and column in (*self.attention.roles, "input"):
            total = total + self._input.functional(column, self._at_residual)
        elif column == "input" and row in self.attention.roles:
            total = total + self._input.functional(row, self._at_residual).mT
        sites = (
            (self._middle, self._at_middle),
            (self._mlp, self._at_sum),
            (self._final, self.gradient_of_output),
        )
        for (site, gradient), into_row, into_column in zip(sites, rows, columns):
            if site is not None:
                total = total + local_hessian(site, row, column, gradient, into_row, into_column)
        return total


def _check_width(what: str, output: Tensor, X: Tensor, culprit: str) -> None:
    if output.shape != X.shape:
        raise ValueError(
            f"{what} gives {output.shape[-1]} entries per token. Must be {X.shape[-1]} to be added "
            f"to X; check the weights {culprit}."
        )


def _check_weights(
    weights: Mapping[str, Tensor], arrangement: str, norm: str | None, final_norm: bool
) -> None:
    missing = [role for role in REQUIRED if role not in weights]
    if missing:
        raise ValueError(
            f"Invalid weights: {', '.join(missing)} missing. Must have {', '.join(REQUIRED)}."
        )
    absent = {"first": arrangement == "post", "middle": False, "final": not final_norm}
    norms = tuple(role for role in NORM_ROLES if norm and not absent[role.split("_")[0]])
    allowed = (*ATTENTION_ROLES, *MLP_ROLES, *norms)
    unknown = [role for role in weights if role not in allowed]
    if unknown:
        raise ValueError(
            f"Invalid weights: {', '.join(unknown)} not used here. Must be among "
            f"{', '.join(allowed)}."
        )
