"""Self-attention of several heads as a function of its weights, in closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.attention_head import AttentionHead, HeadWeights, Scoring
from blockopt.analysis.closed_forms.attention_input import InputDerivatives
from blockopt.analysis.closed_forms.checks import check_number, check_tensors
from blockopt.analysis.closed_forms.rotary_positions import RotaryPositions
from blockopt.analysis.closed_forms.score_vectors import HeadNorm
from blockopt.analysis.closed_forms.transformed_head import TransformedHead
from blockopt.analysis.memory import check_memory
from blockopt.checks import check_choice

Activation = Literal["softmax", "linear"]
Parametrization = Literal["query_key", "single"]


class AttentionMap:
    """Self-attention as a function of its weights: its output and its first two derivatives.

    Several heads may share keys and values (GQA). Queries and keys may be rotated by their
    positions (RoPE) and normalized (QK-norm).

    Args:
        X: Tokens, (L, d) or (B, L, d).
        W_Q: Query weights, (d, dk), or (H, d, dk) for H heads; for "single" the matrix W_QK, (d, d)
            or (H, d, d).
        W_K: Key weights, (d, dk), or (G, d, dk) if H = G g heads share them in groups of g
            neighbours; None for "single".
        W_V: Value weights, (d, dv) or (G, d, dv).
        W_U: The output matrix of each head, (dv, d_out) or (H, dv, d_out), or None. The paper's
            Appendix E calls our W_V its W_O, and writes W_V for the product `W_V W_U`.
        mask: Bool, True where a position (row) sees another (column), or numbers to add to the
            scores (softmax only); (L, L) or (B, L, L). Everything is visible by default.
        scale: The factor of the scores; `1 / sqrt(dk)` by default, and 1 for "single". A
            temperature t divides it.
        activation: "softmax", or "linear" for `A = T`, without softmax.
        parametrization: "query_key" for scores `X W_Q W_Kᵀ Xᵀ`, "single" for `X W_QK Xᵀ`.
        biases: Added to "query", "key" and "value", each (dk,) or one for each head, and to
            "output", (d_out,), as GPT-2 has them. They are constants here, without blocks of their
            own.
        rotary: Rotations of queries and keys by their positions.
        norms: Norms of "query" and "key", before the rotations. Their gains are constants here.

    Attributes:
        output: (B, L, d_out).
        roles: "query", "key", "value" and "output", or "query_key" in the place of the first two.
        shapes: The shape of one weight of each role.
        counts: How many weights of each role there are: keys and values may be fewer.

    Raises:
        ValueError: If shapes do not fit, or if a position sees nothing.
    """

    def __init__(
        self,
        X: Tensor,
        W_Q: Tensor,
        W_K: Tensor | None,
        W_V: Tensor,
        *,
        W_U: Tensor | None = None,
        mask: Tensor | None = None,
        scale: float | None = None,
        activation: Activation = "softmax",
        parametrization: Parametrization = "query_key",
        biases: Mapping[str, Tensor] | None = None,
        rotary: RotaryPositions | None = None,
        norms: Mapping[str, HeadNorm] | None = None,
    ) -> None:
        single, norms, biases = parametrization == "single", norms or {}, biases or {}
        _check_options(W_K, activation, parametrization)
        _check_norms(norms, rotary, single)
        X = X.detach().unsqueeze(0) if X.ndim == 2 else X.detach()
        if X.ndim != 3:
            raise ValueError(f"Invalid X of shape {tuple(X.shape)}. Must be (L, d) or (B, L, d).")
        weights = {"W_Q": W_Q, "W_K": W_K, "W_V": W_V, "W_U": W_U}
        named = {f"bias of {role}": b for role, b in biases.items()}
        given = {name: weight for name, weight in weights.items() if weight is not None}
        check_tensors({"X": X} | given | named)
        stacked = {name: _stacked(name, weight) for name, weight in given.items()}
        self.num_heads = len(stacked["W_Q"])
        groups = len(stacked["W_V" if single else "W_K"])
        if single or self.num_heads % groups:
            groups = self.num_heads
        width, out_width = X.shape[-1], stacked["W_U"].shape[-1] if "W_U" in stacked else 0
        key_width, value_width = (stacked[name].shape[-1] for name in ("W_Q", "W_V"))
        expected = {
            "W_Q": (self.num_heads, width, width if single else key_width),
            "W_K": (groups, width, key_width),
            "W_V": (groups, width, value_width),
            "W_U": (self.num_heads, value_width, out_width),
        }
        for name, weight in stacked.items():
            if weight.shape != expected[name]:
                groups_fit = " Heads that share keys must be a multiple of these." * (
                    name == "W_K" and len(weight) != groups
                )
                raise ValueError(
                    f"Invalid {name} of shape {tuple(weight.shape)}. Must be {expected[name]}."
                    f"{groups_fit}"
                )
        scale = (1.0 if single else 1 / math.sqrt(key_width)) if scale is None else float(scale)
        softmax = activation == "softmax"
        scoring = Scoring(*_read_mask(mask, X, activation), scale, softmax)
        scoring = scoring._replace(
            query_norm=norms.get("query"), key_norm=norms.get("key"), rotary=rotary
        )
        if rotary is not None:
            rotary.check(X, key_width)
        counts = {"query": self.num_heads, "key": groups, "value": groups}
        widths = {"query": key_width, "key": key_width, "value": value_width}
        added = zip(*_read_biases(biases, single, self.num_heads, counts, widths))
        none = [None] * self.num_heads
        by_head = zip(*(_by_head(stacked.get(name, none), none) for name in weights), added)
        self.transformed = rotary is not None or bool(norms)
        kind = TransformedHead if self.transformed else AttentionHead
        self.heads = [kind(X, HeadWeights(*one), scoring) for one in by_head]
        self.scale, self.X = scale, X
        # Softmax does not see a bias of the keys, which adds the same to all scores of a query.
        seen = {"query"} if softmax else {"query", "key"}
        self.biased = seen & biases.keys()
        scores = ("query_key",) if single else ("query", "key")
        self.roles = (*scores, "value", *(("output",) if W_U is not None else ()))
        names = {"query_key": "W_Q", "query": "W_Q", "key": "W_K", "value": "W_V", "output": "W_U"}
        self.shapes = {role: tuple(stacked[names[role]].shape[1:]) for role in self.roles}
        self.counts = {role: counts.get(role, self.num_heads) for role in self.roles}
        self.output = torch.stack([head.output for head in self.heads]).sum(0)
        if "output" in biases:
            if biases["output"].shape != self.output.shape[-1:]:
                raise ValueError(
                    f"Invalid bias of output of shape {tuple(biases['output'].shape)}. Must be "
                    f"{tuple(self.output.shape[-1:])}."
                )
            self.output = self.output + biases["output"].detach()

    def size(self, role: str) -> int:
        """Return the number of entries of a weight in one head."""
        check_choice("role", role, self.roles)
        return math.prod(self.shapes[role])

    def heads_of(self, role: str, number: int) -> range:
        """Return the heads that use a weight: one, or a group that shares keys and values."""
        size = self.num_heads // self.counts[role]
        return range(number * size, (number + 1) * size)

    def jacobian(self, role: str, number: int | None = None) -> Tensor:
        """Return the derivative of the output by a weight, (B L d_out, n), or by all of a role."""
        if number is None:
            self.size(role)  # raises if there is none
            return torch.cat([self.jacobian(role, n) for n in range(self.counts[role])], 1)
        size = self.size(role)
        check_number("head", number, self.counts[role])
        check_memory(self.output.numel(), size, self.X.dtype, self.X.device)
        total = self.X.new_zeros(self.output.numel(), size)
        for head in (self.heads[h] for h in self.heads_of(role, number)):
            factor, W_U = head.factor(role), head.W_U
            width = self.output.shape[-1]
            if factor.projected and W_U is not None:
                core = W_U.mT.expand(*self.X.shape[:2], *W_U.mT.shape)
                factor = factor._replace(core=core if factor.core is None else core @ factor.core)
            total.view(-1, width, size).add_(factor.jacobian(width))
        return total

    def input_jacobian(self) -> Tensor:
        """Return the derivative of the output by all tokens, (B L d_out, B L d)."""
        check_memory(self.output.numel(), self.X.numel(), self.X.dtype, self.X.device)
        found = [InputDerivatives(head).jacobian() for head in self._separate_heads()]
        whole: Tensor = torch.block_diag(*torch.stack(found).sum(0).flatten(1, 2))
        return whole

    def input_functional(self, role: str, g: Tensor) -> Tensor:
        """Return `Σ g · ∂²F / ∂X ∂W_role`, (B L d, n), or by X twice for the role "input"."""
        heads = self._separate_heads()
        if role == "input":
            check_memory(self.X.numel(), self.X.numel(), self.X.dtype, self.X.device)
            found = [InputDerivatives(head).functional(role, g) for head in heads]
            whole: Tensor = torch.block_diag(*torch.stack(found).sum(0))
            return whole
        size, count = self.size(role), self.counts[role]
        total = self.X.new_zeros(self.X.numel(), count, size)
        for number, head in enumerate(heads):
            block = InputDerivatives(head).functional(role, g)
            total[:, number * count // self.num_heads] += block.flatten(0, 1)
        return total.flatten(1)

    def _separate_heads(self) -> list[AttentionHead]:
        if "key" not in self.roles:
            raise ValueError(
                "Derivatives by the input need W_Q and W_K. A single matrix is W_Q with the "
                "identity as W_K and scale=1."
            )
        return self.heads

    def functional(self, row: str, column: str, g: Tensor) -> Tensor:
        """Return `Σ g · ∂²F / ∂W_row ∂W_column` of all weights of both roles.

        It is zero between weights that no head has in common (Appendix E).
        """
        sizes = self.size(row), self.size(column)
        if g.shape[-2:] != self.output.shape[-2:] or g.numel() != self.output.numel():
            raise ValueError(
                f"Invalid g of shape {tuple(g.shape)}. Must be that of the output, "
                f"{tuple(self.output.shape)}."
            )
        g = g.reshape(self.output.shape)
        counts = self.counts[row], self.counts[column]
        whole = g.new_zeros(counts[0], sizes[0], counts[1], sizes[1])
        for number, head in enumerate(self.heads):
            block = head.functional(row, column, g, head.score_gradient(head.before_output(g)))
            i, j = (number * count // self.num_heads for count in counts)
            whole[i, :, j] += block.reshape(sizes)
        return whole.flatten(0, 1).flatten(1)


def _check_options(W_K: Tensor | None, activation: str, parametrization: str) -> None:
    check_choice("activation", activation, get_args(Activation))
    check_choice("parametrization", parametrization, get_args(Parametrization))
    if (W_K is None) != (parametrization == "single"):
        fix = "pass W_QK as W_Q, and None for W_K"
        if W_K is None:
            fix = "pass W_K, or parametrization='single' with W_QK as W_Q"
        raise ValueError(f"Invalid W_K for parametrization={parametrization!r}: {fix}.")


def _stacked(name: str, weight: Tensor) -> Tensor:
    if weight.ndim not in (2, 3):
        raise ValueError(
            f"Invalid {name} of shape {tuple(weight.shape)}. Must be a matrix, or one for each "
            "head: (H, rows, columns)."
        )
    return weight.detach().unsqueeze(0) if weight.ndim == 2 else weight.detach()


def _by_head(weights: Sequence[Tensor | None] | Tensor, heads: Sequence[None]) -> list[Any]:
    """Return the weight of each head, the same for all heads of a group."""
    return [weights[number * len(weights) // len(heads)] for number in range(len(heads))]


def _check_norms(
    norms: Mapping[str, HeadNorm], rotary: RotaryPositions | None, single: bool
) -> None:
    unknown = sorted(norms.keys() - {"query", "key"})
    if unknown:
        raise ValueError(f"Invalid norms {unknown}. Must be of query and key.")
    if single and (norms or rotary is not None):
        raise ValueError(
            "A single matrix W_QK leaves no queries and keys to rotate or normalize. Give W_Q and "
            "W_K."
        )


def _read_biases(
    biases: Mapping[str, Tensor],
    single: bool,
    heads: int,
    counts: Mapping[str, int],
    widths: Mapping[str, int],
) -> list[list[Tensor | float]]:
    """Return what is added to the queries, keys and values of each head."""
    allowed = ("value", "output") if single else (*widths, "output")
    unknown = sorted(biases.keys() - set(allowed))
    if unknown:
        raise ValueError(f"Invalid biases {unknown}. Must be of {', '.join(allowed)}.")
    found: list[list[Tensor | float]] = []
    for role, width in widths.items():
        bias = biases.get(role)
        if bias is None:
            found.append([0.0] * heads)
            continue
        wanted = (counts[role], width)
        if bias.shape != wanted and (bias.shape != (width,) or counts[role] > 1):
            given = tuple(bias.shape)
            raise ValueError(f"Invalid bias of {role} of shape {given}. Must be {wanted}.")
        found.append(_by_head(bias.detach().reshape(wanted), [None] * heads))
    return found


def _read_mask(mask: Tensor | None, X: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    """Return who sees whom, (B, L, L), and what is added to the scores."""
    shape = (X.shape[0], X.shape[1], X.shape[1])
    if mask is None:
        return torch.ones((), dtype=torch.bool, device=X.device).expand(shape), None
    if mask.shape not in (shape, shape[1:]):
        raise ValueError(
            f"Invalid mask of shape {tuple(mask.shape)}. Must be {shape[1:]} or {shape}."
        )
    visible = mask
    if mask.dtype != torch.bool:
        binary = bool((mask == 1).any() and ((mask == 0) | (mask == 1)).all())
        if binary or not mask.is_floating_point():
            raise ValueError(
                f"Invalid mask of {mask.dtype}, all 0 and 1: numbers would be added to the scores. "
                "Use mask.bool()."
            )
        if not bool((mask < math.inf).all()):
            raise ValueError(
                "Invalid mask: numbers that are added to the scores must not be NaN or +inf; -inf "
                "hides a token."
            )
        visible = mask > -math.inf
    if not bool(visible.any(-1).all()):
        raise ValueError(
            "Invalid mask: a position sees no other, not even itself. Let it see itself, or leave "
            "it out."
        )
    if mask.dtype == torch.bool:
        return visible.expand(shape), None
    if activation == "linear":
        raise ValueError(
            "Invalid mask: linear attention has no use for numbers added to the scores. Must be "
            "bool."
        )
    return visible.expand(shape), mask.expand(shape).to(X)
