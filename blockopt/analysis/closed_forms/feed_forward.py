"""The MLP of a transformer block with its exact derivatives, token by token, and the Hessian of a loss on top of it.

With one row y of the input for each token, the output is s = h W_out + b_out, where the hidden
units are

    h = act(u)         u = y W_in + b_in
    h = act(v) ∘ u     v = y W_gate          with a gate (SwiGLU for act = silu)

Every unit depends on its own u and v alone. So with h_u, h_v, h_uu, h_uv, h_vv the derivatives of
the units, and q = W_out g what a gradient g of the output is at them, all second derivatives are
products of vectors and diagonal matrices:

    Σ g·∂²s / ∂W_in[j,k] ∂W_in[j',k']  = y_j y_j' q_k h_uu,k        for k = k', and 0 otherwise
    Σ g·∂²s / ∂W_in[j,k] ∂W_out[k',o]  = y_j h_u,k g_o              for k = k', and 0 otherwise
    Σ g·∂²s / ∂W_in[j,k] ∂y_c          = y_j q_k Σ_p h_up,k W_p[c,k] + q_k h_u,k for j = c

and so on, p being in or gate. A bias is a weight whose input is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.checks import Part, check_number, check_part, check_tensors
from blockopt.analysis.closed_forms.kronecker_sum import KroneckerSum, Matrices, PositionMatrices
from blockopt.analysis.closed_forms.output_loss import OutputLoss
from blockopt.analysis.closed_forms.unit_matrices import UnitMatrices
from blockopt.analysis.memory import check_memory

Activation = Literal["identity", "relu", "gelu", "gelu_tanh", "silu"]
CHUNK_BYTES = 2**27
MLP_ROLES = ("mlp_in", "mlp_in_bias", "mlp_gate", "mlp_out", "mlp_out_bias")


def activation_derivatives(z: Tensor, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """act(z), act'(z) and act''(z); for ReLU the second is 0, which is right but at the kink.

    Example:
        >>> activation_derivatives(torch.tensor([0.0]), "silu")
        (tensor([0.]), tensor([0.5000]), tensor([0.5000]))
    """
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"Invalid activation={activation!r}. Must be one of {', '.join(map(repr, ACTIVATIONS))}."
        )
    return ACTIVATIONS[activation](z)


def _identity(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return z, torch.ones_like(z), torch.zeros_like(z)


def _relu(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return z.relu(), (z > 0).to(z), torch.zeros_like(z)


def _gelu(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    distribution = 0.5 * torch.erfc(-z / math.sqrt(2))  # erfc keeps the digits of the lower tail
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    return z * distribution, distribution + z * density, density * (2 - z.square())


def _gelu_tanh(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    root, cubic = math.sqrt(2 / math.pi), 0.044715
    t = (root * (z + cubic * z**3)).tanh()
    slope, bend = root * (1 + 3 * cubic * z.square()), 6 * root * cubic * z
    s = 1 - t.square()
    return (
        0.5 * z * (1 + t),
        0.5 * (1 + t) + 0.5 * z * s * slope,
        s * slope + 0.5 * z * s * (bend - 2 * t * slope.square()),
    )


def _silu(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = z.sigmoid()
    return z * s, s * (1 + z * (1 - s)), s * (1 - s) * (2 + z * (1 - 2 * s))


ACTIVATIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    **{"identity": _identity, "relu": _relu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "silu": _silu}
}


class FeedForwardMap:
    """The MLP of the module's docstring on the rows of Y: its output, Jacobians and contracted second derivatives.

    N is the number of rows of Y, all batch dimensions together. Weights are vectors in row-major
    order.

    Args:
        Y: Input (..., d).
        W_in: (d, m), as used in `Y @ W_in`: the transposed weight of an `nn.Linear`.
        W_out: (m, d_out).
        W_gate: (d, m), for a gated MLP.
        b_in: (m,), added before the activation (with a gate: to the factor that has no activation).
        b_out: (d_out,).
        activation: Of the hidden units, or of the gate if there is one. "gelu" is the exact one.

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
            raise ValueError(
                f"Invalid weights of shapes {tuple(W_in.shape)} and {tuple(W_out.shape)}. Must be (d, m) and (m, d_out)."
            )
        d, m, d_out = Y.shape[-1], *W_in.shape[1:], *W_out.shape[1:]
        wanted = {
            "W_in": (d, m),
            "W_gate": (d, m),
            "W_out": (m, d_out),
            "b_in": (m,),
            "b_out": (d_out,),
        }
        given = {"W_in": W_in, "W_gate": W_gate, "W_out": W_out, "b_in": b_in, "b_out": b_out}
        for name, value in given.items():
            if value is not None and value.shape != wanted[name]:
                raise ValueError(
                    f"Invalid {name} of shape {tuple(value.shape)}. Must be {wanted[name]} to fit Y, W_in and W_out."
                )
        check_tensors(
            {"Y": Y} | {name: value for name, value in given.items() if value is not None}
        )
        Y, W_in, W_out = Y.detach(), W_in.detach(), W_out.detach()
        W_gate, b_in, b_out = (
            None if value is None else value.detach() for value in (W_gate, b_in, b_out)
        )
        self.W_out = W_out
        parameters = (W_in, b_in, W_gate, W_out, b_out)
        self.sizes = {
            role: value.numel() for role, value in zip(MLP_ROLES, parameters) if value is not None
        }
        self.roles = tuple(self.sizes)
        self.y = Y.flatten(0, -2) if Y.ndim > 1 else Y.unsqueeze(0)  # (N, d)
        u = self.y @ W_in if b_in is None else self.y @ W_in + b_in
        # The units and their derivatives (N, m), by "in" and "gate"
        if W_gate is None:
            self.hidden, first, second = activation_derivatives(u, activation)
            self._first, self._second, self._before = (
                {"in": first},
                {("in", "in"): second},
                {"in": W_in},
            )
        else:
            value, slope, bend = activation_derivatives(self.y @ W_gate, activation)
            self.hidden, self._first, self._before = (
                value * u,
                {"in": value, "gate": slope * u},
                {"in": W_in, "gate": W_gate},
            )
            zero = torch.zeros_like(u)
            self._second = {
                ("in", "in"): zero,
                ("in", "gate"): slope,
                ("gate", "in"): slope,
                ("gate", "gate"): bend * u,
            }
        output = self.hidden @ W_out if b_out is None else self.hidden @ W_out + b_out
        self.output = output.reshape(*Y.shape[:-1], -1)

    def factor(self, role: str) -> tuple[Tensor, Tensor | None]:
        """The Jacobian of each row's output by a parameter as a vector (N, p) ⊗ a core (N, d_out, r); None is the identity.

        ∂s_o / ∂W[j, k] = vector_j core_ok.
        """
        vector, side = self._vector(role)
        return vector, None if side == "out" else (self._first[side].unsqueeze(-1) * self.W_out).mT

    def jacobian(self, role: str) -> Tensor:
        """∂output/∂parameter, (N·d_out, n)."""
        vector, core = self.factor(role)
        if core is None:
            identity = torch.eye(self.W_out.shape[1], dtype=vector.dtype, device=vector.device)
            return torch.einsum("nj,oc->nojc", vector, identity).flatten(0, 1).flatten(1)
        return torch.einsum("nj,nok->nojk", vector, core).flatten(0, 1).flatten(1)

    def input_jacobian(self) -> Tensor:
        """∂output/∂y of each row, (N, d_out, d)."""
        slopes = self._chunks(*self._first.values())
        terms = (
            [(a.unsqueeze(-2) * W) @ self.W_out for a, W in zip(rows, self._before.values())]
            for rows in slopes
        )
        return torch.cat([torch.stack(rows).sum(0).mT for rows in terms])

    def functional(self, row: str, column: str, g: Tensor) -> Tensor:
        """Σ g·∂²output/∂row∂column, (n_row, n_column), for g of the shape of the output."""
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
        """Σ g·∂²output/∂parameter∂y, (n, N, d): the second derivative by a parameter and the input."""
        vector, side = self._vector(role)
        g = self._rows(g)
        if side == "out":
            if role == "mlp_out_bias":
                return g.new_zeros(self.W_out.shape[1], *self.y.shape)
            slopes = torch.stack(
                [self._first[p].unsqueeze(-2) * W for p, W in self._before.items()]
            ).sum(0)  # (N, d, m)
            return torch.einsum("nck,no->konc", slopes, g).flatten(0, 1)
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
        """Σ g·∂²output/∂y∂y of each row, (N, d, d)."""
        q = self._rows(g) @ self.W_out.mT
        pairs = [(self._before[a], self._before[b].mT) for a, b in self._second]
        bends = self._chunks(*(q * bend for bend in self._second.values()))
        terms = (
            [(left * e.unsqueeze(-2)) @ right for e, (left, right) in zip(rows, pairs)]
            for rows in bends
        )
        return torch.cat([torch.stack(rows).sum(0) for rows in terms])

    def input_pulled(self, g: Tensor) -> Tensor:
        """The gradient at the input from the one at the output, (N, d): O(d m) a row."""
        q = self._rows(g) @ self.W_out.mT
        return torch.stack(
            [(q * first) @ self._before[side].mT for side, first in self._first.items()]
        ).sum(0)

    def matrices(self, role: str, curvature: Tensor | None, g: Tensor | None) -> PositionMatrices:
        """E_i of the factored Hessian Σ_i a_i a_iᵀ ⊗ E_i by one parameter, where a is the vector of `factor`.

        Args:
            role: The parameter.
            curvature: Λ_i of a loss on the output, (N, d_out, d_out), or None to leave out the
                outer part.
            g: Its gradient, or None to leave out the functional part.
        """
        side = self._vector(role)[1]
        if side == "out":
            size = self.W_out.shape[1]
            return Matrices(
                self.y.new_zeros(1, 1, 1).expand(len(self.y), size, size)
                if curvature is None
                else curvature
            )
        bends = None if g is None else (self._rows(g) @ self.W_out.mT) * self._second[side, side]
        return UnitMatrices(self._first[side], self.W_out, curvature, bends)

    def _vector(self, role: str) -> tuple[Tensor, str]:
        if role not in self.roles:
            raise ValueError(
                f"Invalid role {role!r}. Must be one of {', '.join(map(repr, self.roles))}."
            )
        if role.endswith("bias"):
            return torch.ones_like(self.y[:, :1]), "in" if role == "mlp_in_bias" else "out"
        return (
            (self.hidden, "out")
            if role == "mlp_out"
            else (self.y, "in" if role == "mlp_in" else "gate")
        )

    def _chunks(self, *units: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Rows of some (N, m) tensors, so many at a time that a matrix d × m of each fits in `CHUNK_BYTES`."""
        step = max(1, CHUNK_BYTES // (self._before["in"].numel() * self.y.element_size()))
        return zip(*(unit.split(step) for unit in units))

    def _rows(self, g: Tensor) -> Tensor:
        return g.reshape(len(self.y), -1)


class FeedForwardHessian:
    """The Hessian of a loss on top of an MLP: H = H_o + H_f, the outer product (Gauss-Newton) and the functional part.

    With Λ_i the Hessian and g_i the gradient of the loss in the output of row i, and D_i the
    diagonal matrix of act',

        H(in, in)   = Σ_i y_i y_iᵀ ⊗ (D_i W_out Λ_i W_outᵀ D_i + diag(W_out g_i ∘ act''))
        H(out, out) = Σ_i h_i h_iᵀ ⊗ Λ_i

    where the first summand is H_o and the second H_f. For ReLU the diagonal blocks have no
    functional part.

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
        """∂²loss/∂row∂column (n_row, n_column), or one of its parts."""
        check_part(part)
        (a, left), (b, right) = self.mlp.factor(row), self.mlp.factor(column)
        outer = (
            torch.einsum("nj,nl,nkm->jklm", a, b, self._between(left, right))
            .flatten(0, 1)
            .flatten(1)
        )
        if part == "outer":
            return outer
        functional = self.mlp.functional(row, column, self.gradient_of_output)
        return functional if part == "functional" else outer + functional

    def dense(self, part: Part = "full") -> Tensor:
        """The whole matrix, in the order of `roles`, each row-major."""
        size = sum(self.mlp.sizes.values())
        check_memory(size, size, self.mlp.y.dtype, self.mlp.y.device)
        return torch.cat(
            [
                torch.cat([self.block(row, column, part) for column in self.roles], 1)
                for row in self.roles
            ]
        )

    def factored(self, role: str, part: Part = "full") -> KroneckerSum:
        """A diagonal block as Σ_i a_i a_iᵀ ⊗ E_i, never built: trace, diagonal, Frobenius norm, products with vectors."""
        check_part(part)
        curvature = None if part == "functional" else self._curvature
        gradient = None if part == "outer" else self.gradient_of_output
        return KroneckerSum(
            self.mlp.factor(role)[0], self.mlp.matrices(role, curvature, gradient), True
        )

    def _between(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        """leftᵀ Λ_i right, (N, r, s)."""
        half = self._curvature if left is None else left.mT @ self._curvature
        return half if right is None else half @ right


class LinearNetworkHessian:
    """The Hessian of a loss on a linear network of any depth, F = X W_1 ... W_D (Singh et al. 2021, in rows).

    With A_i = X W_1 ... W_{i-1} before and B_i = W_{i+1} ... W_D after weight i, and G the gradient
    of the loss in F,

        H_o(i, j)          = c A_iᵀ A_j ⊗ B_i B_jᵀ                       for the squared error, c = 2 / numel
        H_f(i, j)[ac, eb]  = (A_iᵀ G B_jᵀ)_ab (W_{i+1} ... W_{j-1})_ce     for i < j

    and H_f(i, i) = 0: the functional part is block-hollow. H_o depends on the data through XᵀX
    alone, at any depth.

    Args:
        X: Input (..., d_0).
        weights: W_1 (d_0, d_1) to W_D (d_{D-1}, d_D).
        loss: `SquaredError(target)` or `CrossEntropy(W, targets)` on F.

    Example:
        >>> from blockopt.analysis.closed_forms.output_loss import SquaredError
        >>> two = torch.full((1, 1), 2.0)
        >>> LinearNetworkHessian(torch.ones(1, 1), [two, two], SquaredError(torch.zeros(1, 1))).dense()  # of (w_1 w_2)²
        tensor([[ 8., 16.],
                [16.,  8.]])
    """

    def __init__(self, X: Tensor, weights: Sequence[Tensor], loss: OutputLoss) -> None:
        if not weights:
            raise ValueError("Invalid weights=[]. Must be at least one matrix.")
        check_tensors({"X": X} | {f"weight {number}": W for number, W in enumerate(weights)})
        self.weights = [W.detach() for W in weights]
        self._before = [X.detach()]
        for number, W in enumerate(self.weights):
            if W.ndim != 2 or W.shape[0] != self._before[-1].shape[-1]:
                needed = f"({self._before[-1].shape[-1]}, any)"
                raise ValueError(
                    f"Invalid weight {number} of shape {tuple(W.shape)}. Must be {needed} to follow what is before it."
                )
            self._before.append(self._before[-1] @ W)
        self.output = self._before.pop()
        self._gradient = loss.gradient(self.output).flatten(0, -2)
        self._curvature = loss.curvature(self.output).flatten(0, -3)
        self._before = [before.flatten(0, -2) for before in self._before]

    def block(self, row: int, column: int, part: Part = "full") -> Tensor:
        """∂²loss/∂W_row∂W_column (n_row, n_column), or one of its parts; weights count from 0."""
        check_part(part)
        for name, number in (("row", row), ("column", column)):
            check_number(name, number, len(self.weights))
        check_memory(
            self.weights[row].numel(),
            self.weights[column].numel(),
            self.output.dtype,
            self.output.device,
        )
        after = [self._product(index + 1, len(self.weights)) for index in (row, column)]
        middle = after[0] @ self._curvature @ after[1].mT  # (N, r, s)
        outer = torch.einsum("na,nb,nrs->arbs", self._before[row], self._before[column], middle)
        outer = outer.flatten(0, 1).flatten(1)
        if part == "outer":
            return outer
        functional = self._functional(row, column)
        return functional if part == "functional" else outer + functional

    def dense(self, part: Part = "full") -> Tensor:
        """The whole matrix, first weight first, each row-major."""
        size = sum(W.numel() for W in self.weights)
        check_memory(size, size, self.output.dtype, self.output.device)
        number = range(len(self.weights))
        return torch.cat(
            [torch.cat([self.block(row, column, part) for column in number], 1) for row in number]
        )

    def _functional(self, row: int, column: int) -> Tensor:
        if row > column:
            return self._functional(column, row).mT
        if row == column:
            return self.output.new_zeros(self.weights[row].numel(), self.weights[row].numel())
        ends = (
            self._before[row].mT @ self._gradient @ self._product(column + 1, len(self.weights)).mT
        )
        return (
            torch.einsum("ab,ce->aceb", ends, self._product(row + 1, column))
            .flatten(0, 1)
            .flatten(1)
        )

    def _product(self, start: int, stop: int) -> Tensor:
        """W_start ... W_{stop-1}, or the identity."""
        size = (
            self.weights[start].shape[0] if start < len(self.weights) else self.weights[-1].shape[1]
        )
        product = torch.eye(size, dtype=self.output.dtype, device=self.output.device)
        for W in self.weights[start:stop]:
            product = product @ W
        return product
