"""The MLP of a transformer block, its exact derivatives, and the Hessian of a loss on it.

With one row y of the input for each token, the output is s = h W_out + b_out, where the hidden
units are

    h = act(u)         u = y W_in + b_in
    h = act(v) ∘ u     v = y W_gate          with a gate (SwiGLU for act = silu)

Every unit depends on its own u and v alone. So with h_u, h_v, h_uu, h_uv, h_vv the derivatives of
the units, and q = W_out g the gradient at the units for a gradient g of the output, all second
derivatives are products of vectors and diagonal matrices:

    Σ g·∂²s / ∂W_in[j,k] ∂W_in[j',k']  = y_j y_j' q_k h_uu,k        for k = k', and 0 otherwise
    Σ g·∂²s / ∂W_in[j,k] ∂W_out[k',o]  = y_j h_u,k g_o              for k = k', and 0 otherwise
    Σ g·∂²s / ∂W_in[j,k] ∂y_c          = y_j q_k Σ_p h_up,k W_p[c,k] + q_k h_u,k for j = c

and so on, p being in or gate. A bias is a weight whose input is 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.activations import Activation, activation_derivatives
from blockopt.analysis.closed_forms.checks import Part, check_part, check_tensors
from blockopt.analysis.closed_forms.kronecker_sum import KroneckerSum, Matrices, PositionMatrices
from blockopt.analysis.closed_forms.output_loss import OutputLoss
from blockopt.analysis.closed_forms.unit_matrices import UnitMatrices
from blockopt.analysis.memory import check_memory
from blockopt.checks import check_choice

CHUNK_BYTES = 2**27
MLP_ROLES = ("mlp_in", "mlp_in_bias", "mlp_gate", "mlp_out", "mlp_out_bias")


class FeedForwardMap:
    """The MLP on the rows of Y: its output, its Jacobians and contracted second derivatives.

    N is the number of rows of Y, all batch dimensions together. Weights are vectors in row-major
    order.

    Args:
        Y: Input (..., d).
        W_in: (d, m), as used in `Y @ W_in`: the transposed weight of an `nn.Linear`.
        W_out: (m, d_out).
        W_gate: (d, m), for a gated MLP.
        b_in: (m,), added before the activation; with a gate, to the factor without activation.
        b_out: (d_out,).
        activation: The activation of the hidden units, or of the gate if there is one. "gelu" is
            the exact one.

    Attributes:
        roles: The parameters given, of "mlp_in", "mlp_in_bias", "mlp_gate", "mlp_out",
            "mlp_out_bias".
        output: (..., d_out).

    Raises:
        ValueError: If a shape or the activation is wrong.

    Example:
        >>> W_in, W_out = torch.tensor([[1.0, -1.0]]), torch.tensor([[3.0], [5.0]])
        >>> mlp = FeedForwardMap(torch.tensor([[2.0]]), W_in, W_out, activation="relu")
        >>> mlp.output, mlp.jacobian("mlp_in")  # the second unit is off
        (tensor([[6.]]), tensor([[6., 0.]]))
    """

    def __init__(
        self,
        Y: Tensor,
        W_in: Tensor,
        W_out: Tensor,
        *,
        W_gate: Tensor | None = None,
        b_in: Tensor | None = None,
        b_out: Tensor | None = None,
        activation: Activation = "gelu",
    ) -> None:
        if W_in.ndim != 2 or W_out.ndim != 2:
            shapes = f"{tuple(W_in.shape)} and {tuple(W_out.shape)}"
            raise ValueError(f"Invalid weights of shapes {shapes}. Must be (d, m) and (m, d_out).")
        d, m, d_out = Y.shape[-1], *W_in.shape[1:], *W_out.shape[1:]
        weights = {
            "W_in": (W_in, (d, m)),
            "b_in": (b_in, (m,)),
            "W_gate": (W_gate, (d, m)),
            "W_out": (W_out, (m, d_out)),
            "b_out": (b_out, (d_out,)),
        }
        given: dict[str, Tensor] = {}
        for name, (value, wanted) in weights.items():
            if value is None:
                continue
            given[name] = value.detach()
            if value.shape != wanted:
                raise ValueError(
                    f"Invalid {name} of shape {tuple(value.shape)}. Must be {wanted} to fit Y, "
                    "W_in and W_out."
                )
        check_tensors({"Y": Y, **given})
        Y, W_in, self.W_out = Y.detach(), given["W_in"], given["W_out"]
        roles = zip(MLP_ROLES, weights)
        self.sizes = {role: given[name].numel() for role, name in roles if name in given}
        self.roles = tuple(self.sizes)
        self.y = Y.flatten(0, -2) if Y.ndim > 1 else Y.unsqueeze(0)  # (N, d)
        u = self.y @ W_in + given.get("b_in", 0)
        # The units and their derivatives (N, m), by "in" and "gate"
        self._before = {"in": W_in}
        if W_gate is None:
            self.hidden, first, second = activation_derivatives(u, activation)
            self._first, self._second = {"in": first}, {("in", "in"): second}
        else:
            self._before["gate"] = given["W_gate"]
            value, slope, bend = activation_derivatives(self.y @ given["W_gate"], activation)
            self.hidden, self._first = value * u, {"in": value, "gate": slope * u}
            self._second = {
                ("in", "in"): torch.zeros_like(u),
                ("in", "gate"): slope,
                ("gate", "in"): slope,
                ("gate", "gate"): bend * u,
            }
        output = self.hidden @ self.W_out + given.get("b_out", 0)
        self.output = output.reshape(*Y.shape[:-1], -1)

    def factor(self, role: str) -> tuple[Tensor, Tensor | None]:
        """Return the Jacobian of each row by a parameter: a vector (N, p) ⊗ a core (N, d_out, r).

        ∂s_o / ∂W[j, k] = vector_j core_ok, and None is the identity.
        """
        vector, side = self._vector(role)
        return vector, None if side == "out" else (self._first[side].unsqueeze(-1) * self.W_out).mT

    def jacobian(self, role: str) -> Tensor:
        """Return ∂output/∂parameter, (N·d_out, n)."""
        vector, core = self.factor(role)
        if core is None:
            identity = torch.eye(self.W_out.shape[1], dtype=vector.dtype, device=vector.device)
            return torch.einsum("nj,oc->nojc", vector, identity).flatten(0, 1).flatten(1)
        return torch.einsum("nj,nok->nojk", vector, core).flatten(0, 1).flatten(1)

    def input_jacobian(self) -> Tensor:
        """Return ∂output/∂y of each row, (N, d_out, d)."""
        slopes = self._chunks(*self._first.values())
        terms = (
            [(a.unsqueeze(-2) * W) @ self.W_out for a, W in zip(rows, self._before.values())]
            for rows in slopes
        )
        return torch.cat([torch.stack(rows).sum(0).mT for rows in terms])

    def functional(self, row: str, column: str, g: Tensor) -> Tensor:
        """Return Σ g·∂²output/∂row∂column, (n_row, n_column), for g of the output's shape."""
        (a, side_a), (b, side_b) = self._vector(row), self._vector(column)
        g = self._rows(g)
        if side_a == "out" and side_b == "out":
            size = self.W_out.shape[1]
            return g.new_zeros(a.shape[1] * size, b.shape[1] * size)  # linear in the last weight
        if side_a == "out":
            return self.functional(column, row, g).mT
        if column == "mlp_out_bias":
            return g.new_zeros(a.shape[1] * self.W_out.shape[0], self.W_out.shape[1])
        if side_b == "out":
            diagonal = torch.einsum("nj,nk,no->jok", a, self._first[side_a], g)
            return torch.diag_embed(diagonal).permute(0, 2, 3, 1).flatten(0, 1).flatten(1)
        bend = (g @ self.W_out.mT) * self._second[side_a, side_b]
        diagonal = torch.einsum("nj,nk,nl->jlk", a, bend, b)
        return torch.diag_embed(diagonal).transpose(1, 2).flatten(0, 1).flatten(1)

    def mixed_hessian(self, role: str, g: Tensor) -> Tensor:
        """Return Σ g·∂²output/∂parameter∂y, (n, N, d)."""
        vector, side = self._vector(role)
        g = self._rows(g)
        if side == "out":
            if role == "mlp_out_bias":
                return g.new_zeros(self.W_out.shape[1], *self.y.shape)
            slopes = [self._first[p].unsqueeze(-2) * W for p, W in self._before.items()]
            summed = torch.stack(slopes).sum(0)  # (N, d, m)
            return torch.einsum("nck,no->konc", summed, g).flatten(0, 1)
        q = g @ self.W_out.mT
        bends = torch.stack(
            [(q * self._second[side, p]).unsqueeze(-2) * W for p, W in self._before.items()]
        ).sum(0)
        mixed = torch.einsum("nj,nck->jknc", vector, bends)
        if role != "mlp_in_bias":  # its vector is y itself
            identity = torch.eye(self.y.shape[1], dtype=g.dtype, device=g.device)
            mixed = mixed + torch.einsum("jc,nk->jknc", identity, q * self._first[side])
        return mixed.flatten(0, 1)

    def input_hessian(self, g: Tensor) -> Tensor:
        """Return Σ g·∂²output/∂y∂y of each row, (N, d, d)."""
        q = self._rows(g) @ self.W_out.mT
        pairs = [(self._before[a], self._before[b].mT) for a, b in self._second]
        bends = self._chunks(*(q * bend for bend in self._second.values()))
        terms = (
            [(left * e.unsqueeze(-2)) @ right for e, (left, right) in zip(rows, pairs)]
            for rows in bends
        )
        return torch.cat([torch.stack(rows).sum(0) for rows in terms])

    def input_pulled(self, g: Tensor) -> Tensor:
        """Return the gradient at the input from the one at the output, (N, d)."""
        q = self._rows(g) @ self.W_out.mT
        pulled = [(q * first) @ self._before[side].mT for side, first in self._first.items()]
        return torch.stack(pulled).sum(0)

    def matrices(self, role: str, curvature: Tensor | None, g: Tensor | None) -> PositionMatrices:
        """Return E_i of the factored Hessian Σ_i a_i a_iᵀ ⊗ E_i, where a is the vector of `factor`.

        Args:
            role: The parameter.
            curvature: Λ_i of a loss on the output, (N, d_out, d_out), or None to leave out the
                outer part.
            g: The gradient of that loss, or None to leave out the functional part.
        """
        side = self._vector(role)[1]
        if side == "out":
            if curvature is None:
                size = self.W_out.shape[1]
                curvature = self.y.new_zeros(1, 1, 1).expand(len(self.y), size, size)
            return Matrices(curvature)
        bends = None if g is None else (self._rows(g) @ self.W_out.mT) * self._second[side, side]
        return UnitMatrices(self._first[side], self.W_out, curvature, bends)

    def _vector(self, role: str) -> tuple[Tensor, str]:
        check_choice("role", role, self.roles)
        ones = torch.ones_like(self.y[:, :1])
        return {
            "mlp_in": (self.y, "in"),
            "mlp_in_bias": (ones, "in"),
            "mlp_gate": (self.y, "gate"),
            "mlp_out": (self.hidden, "out"),
            "mlp_out_bias": (ones, "out"),
        }[role]

    def _chunks(self, *units: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Split tensors (N, m) into rows for which matrices d × m fit in `CHUNK_BYTES`."""
        step = max(1, CHUNK_BYTES // (self._before["in"].numel() * self.y.element_size()))
        return zip(*(unit.split(step) for unit in units))

    def _rows(self, g: Tensor) -> Tensor:
        return g.reshape(len(self.y), -1)


class FeedForwardHessian:
    """The Hessian `H = H_o + H_f` of a loss on top of an MLP.

    With Λ_i the Hessian and g_i the gradient of the loss in the output of row i, and D_i the
    diagonal matrix of act',

        H(in, in)   = Σ_i y_i y_iᵀ ⊗ (D_i W_out Λ_i W_outᵀ D_i + diag(W_out g_i ∘ act''))
        H(out, out) = Σ_i h_i h_iᵀ ⊗ Λ_i

    where the first summand is the outer product (Gauss-Newton) part H_o and the second the
    functional part H_f. For ReLU the diagonal blocks have no functional part.

    Args:
        mlp: The MLP on its input.
        loss: `SquaredError(target)` or `CrossEntropy(W, targets)` on its output.

    Example:
        >>> from blockopt.analysis.closed_forms.output_loss import SquaredError
        >>> W_in, W_out = torch.tensor([[1.0, -1.0]]), torch.tensor([[3.0], [5.0]])
        >>> mlp = FeedForwardMap(torch.tensor([[2.0]]), W_in, W_out, activation="relu")
        >>> hessian = FeedForwardHessian(mlp, SquaredError(torch.tensor([[0.0]])))
        >>> hessian.block("mlp_in", "mlp_in")
        tensor([[72.,  0.],
                [ 0.,  0.]])
    """

    def __init__(self, mlp: FeedForwardMap, loss: OutputLoss) -> None:
        self.mlp, self.loss, self.roles = mlp, loss, mlp.roles
        self.gradient_of_output = loss.gradient(mlp.output)
        self._curvature = loss.curvature(mlp.output).flatten(0, -3)  # (N, d_out, d_out)

    def block(self, row: str, column: str, part: Part = "full") -> Tensor:
        """Return ∂²loss/∂row∂column, (n_row, n_column), or one of its parts."""
        check_part(part)
        (a, left), (b, right) = self.mlp.factor(row), self.mlp.factor(column)
        outer = torch.einsum("nj,nl,nkm->jklm", a, b, self._between(left, right))
        outer = outer.flatten(0, 1).flatten(1)
        if part == "outer":
            return outer
        functional = self.mlp.functional(row, column, self.gradient_of_output)
        return functional if part == "functional" else outer + functional

    def dense(self, part: Part = "full") -> Tensor:
        """Return the whole matrix, in the order of `roles`, each row-major."""
        size = sum(self.mlp.sizes.values())
        check_memory(size, size, self.mlp.y.dtype, self.mlp.y.device)
        rows = ([self.block(row, column, part) for column in self.roles] for row in self.roles)
        return torch.cat([torch.cat(row, 1) for row in rows])

    def factored(self, role: str, part: Part = "full") -> KroneckerSum:
        """Return a diagonal block as Σ_i a_i a_iᵀ ⊗ E_i, an operator that is never built."""
        check_part(part)
        curvature = None if part == "functional" else self._curvature
        gradient = None if part == "outer" else self.gradient_of_output
        matrices = self.mlp.matrices(role, curvature, gradient)
        return KroneckerSum(self.mlp.factor(role)[0], matrices, True)

    def _between(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        """leftᵀ Λ_i right, (N, r, s)."""
        half = self._curvature if left is None else left.mT @ self._curvature
        return half if right is None else half @ right
