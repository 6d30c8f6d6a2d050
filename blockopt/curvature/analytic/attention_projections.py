"""Where attention happens in a model: a captured call, the projections that feed it, and the blocks of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt.blocks import Blocks
from blockopt.blocks.split import expand_along
from blockopt.curvature.analytic.attention_forms import (
    Attention,
    functional_key,
    functional_query,
    outer_key,
    outer_value,
    score_derivatives,
)
from blockopt.curvature.analytic.layer_calls import LayerCall, Use, by_position, squared_sums
from blockopt.measure.attention_capture import AttentionCall

ROLES = ("query", "key", "value")


class Projection:
    """The part of a weight, and of its bias, that makes the queries, keys or values of a call.

    Attributes:
        mask: Which blocks of the weight.
        inputs: For the weight and for the bias its name, which of its blocks, and what it
            multiplies, (B, S, D) or ones.
    """

    def __init__(
        self,
        role: str,
        weight: str,
        bias: str | None,
        x: Tensor,
        layer: LayerCall | None,
        blocks: Blocks,
    ) -> None:
        self.mask = torch.tensor([r == role for r in blocks.block_roles])
        self.inputs = [(weight, self.mask, x)]
        if bias is not None:
            self.inputs.append((bias, self.mask, torch.ones_like(x[..., :1])))
        self.layer, self._blocks = layer, blocks

    def heads(self, y: Tensor, width: int) -> Tensor:
        """(B, heads, S, width) of this role, from the output of the layer or a gradient at it, (B, S, outputs)."""
        split = self._blocks.split
        if split is not None:
            y = y[..., self.mask[expand_along(torch.arange(split.num_blocks), split)].to(y.device)]
        return y.reshape(*y.shape[:2], -1, width).transpose(1, 2)


def _by_block(values: Tensor, mask: Tensor) -> Tensor:
    """One value a head, summed to one a block of the mask."""
    return values.view(int(mask.sum()), -1).sum(1)


def _are_heads(name: str, mask: Tensor, heads: int, blocks: Mapping[str, Blocks]) -> bool:
    """Whether the blocks of the mask are those of a parameter, and are heads or groups of them."""
    return (
        len(mask) == blocks[name].num_blocks and bool(mask.any()) and heads % int(mask.sum()) == 0
    )


class Site:
    """One attention call with its projections, of which those may be missing that are frozen or not understood."""

    def __init__(self, call: AttentionCall, projections: dict[str, Projection]) -> None:
        self.call, self.projections = call, projections

    @staticmethod
    def of(
        model: nn.Module,
        call: AttentionCall,
        index: int,
        layers: list[LayerCall],
        blocks: Mapping[str, Blocks],
    ) -> Site:
        """Find the projections of the call with this index: the linear maps that its module ran just before it."""
        found: dict[str, Projection] = {}
        batch, keys = call.query.shape[0], call.key.shape[-2]
        for layer in layers:
            inside = layer.module.startswith(f"{call.module}.") or not call.module
            if (
                layer.kind != "linear"
                or layer.weight is None
                or layer.attention_calls != index
                or not inside
            ):
                continue
            for role in {role for role in blocks[layer.weight].roles if role in ROLES}:
                if layer.x.shape[:2] == (batch, call.query.shape[-2] if role == "query" else keys):
                    entry = blocks[layer.weight]
                    found[role] = Projection(role, layer.weight, layer.bias, layer.x, layer, entry)
        module = model.get_submodule(call.module)
        if isinstance(module, nn.MultiheadAttention) and call.x is not None:
            found = _torch_projections(call, module, blocks)
        site = Site(call, found)
        for (
            role,
            projection,
        ) in found.items():  # blocks of one's own need not be made of whole heads
            heads = call.query.shape[1] if role == "query" else site.groups
            projection.inputs = [
                entry for entry in projection.inputs if _are_heads(*entry[:2], heads, blocks)
            ]
        return site

    @cached_property
    def groups(self) -> int:
        """The number of key heads, before any repetition."""
        groups = self.call.key.shape[1]
        for role in ("key", "value"):
            projection = self.projections.get(role)
            if projection is not None and projection.layer is not None:
                groups = projection.heads(
                    projection.layer.y[:1], getattr(self.call, role).shape[-1]
                ).shape[1]
        return groups

    @cached_property
    def attention(self) -> Attention:
        """The numbers of the call."""
        return Attention.of(self.call, self.groups)

    def _compare(self, role: str) -> tuple[str, float]:
        """How what attention was given differs from the projection's output: "plain", "rotated" or "other", and its factor.

        OPT multiplies its queries by the scale of the scores before attention, RoPE rotates queries
        and keys.
        """
        layer, given = self.projections[role].layer, getattr(self.call, role)[:1].detach()
        if layer is None:
            return "plain", 1.0
        heads = self.projections[role].heads(layer.y[:1], given.shape[-1])
        given = given[:, :: given.shape[1] // heads.shape[1]].to(
            heads.dtype
        )  # drops the repetitions of shared heads
        factor = float(given.norm() / heads.norm().clamp(min=torch.finfo(heads.dtype).tiny))
        if torch.allclose(given, factor * heads, rtol=1e-3, atol=1e-5):
            return "plain", factor
        rotated = torch.allclose(
            given.norm(dim=-1), factor * heads.norm(dim=-1), rtol=1e-2, atol=1e-5
        )
        return ("rotated" if rotated else "other"), factor

    def _rotated(
        self, layer: LayerCall, factor: float, num_probes: int | None, generator: torch.Generator
    ) -> list[Tensor]:
        """`R_jᵀ r` for random signs r, or for all of a basis, (B, H, S, dk): the gradient of `r · k_j` before the rotation."""
        key = self.call.key
        basis = torch.eye(key.shape[-1], device=key.device, dtype=key.dtype)
        if num_probes is not None:
            signs = torch.randint(
                0, 2, (num_probes, key.shape[-1]), generator=generator, device=generator.device
            )
            basis = (2 * signs - 1).to(basis) / num_probes**0.5
        repeats = key.shape[1] // self.groups
        along = []
        for r in basis:
            at_key = torch.zeros_like(key)
            at_key[:, ::repeats] = r / factor
            (gradient,) = torch.autograd.grad(key, layer.edge, at_key, retain_graph=True)
            heads = self.projections["key"].heads(layer.cut(gradient), key.shape[-1])
            along.append(
                heads.to(self.attention.query.dtype).repeat_interleave(
                    self.call.query.shape[1] // self.groups, dim=1
                )
            )
        return along

    def add_functional(
        self,
        traces: dict[str, Tensor],
        g: Tensor,
        num_probes: int | None,
        generator: torch.Generator,
    ) -> None:
        """Add the functional part of the query and key blocks, for the gradient g at the attention output."""
        query, key = self.projections.get("query"), self.projections.get("key")
        scores = score_derivatives(self.attention, g.to(self.attention.weights.dtype))
        if query is not None and (compared := self._compare("query"))[0] != "other":
            per_position = compared[1] ** 2 * functional_query(self.attention, scores)
            for name, mask, x in query.inputs:
                per_head = (per_position * x.square().sum(-1).unsqueeze(1)).sum((0, 2))
                traces[name][mask] += _by_block(per_head, mask).to(traces[name])
        if key is not None and (compared := self._compare("key"))[0] != "other":
            rotated = None
            if compared[0] == "rotated" and key.layer is not None:
                rotated = self._rotated(key.layer, compared[1], num_probes, generator)
            for name, mask, x in key.inputs:
                per_head = compared[1] ** 2 * functional_key(self.attention, scores, x, rotated)
                traces[name][mask] += _by_block(per_head, mask).to(traces[name])

    def add_outer(
        self,
        traces: dict[str, Tensor],
        uses: dict[str, list[Use]],
        delta: Tensor,
        blocks: Mapping[str, Blocks],
        factor: float,
    ) -> None:
        """Add one factor of Λ for the projections and take them out of `uses`: where nothing above mixes positions."""
        delta = delta.to(self.attention.weights.dtype)
        inputs = [
            (role, *entry)
            for role, projection in self.projections.items()
            for entry in projection.inputs
        ]
        for name in {name for _, name, _, _ in inputs if name in uses and len(uses[name]) == 1}:
            use, split = uses.pop(name)[0], blocks[name].split
            sums = squared_sums([use], split)
            local = squared_sums([by_position(use)], split)
            for role, mask, x in [
                (role, mask, x) for role, other, mask, x in inputs if other == name
            ]:
                if role == "query":
                    sums = torch.where(mask.to(sums.device), local, sums)
                elif (compared := self._compare(role))[0] == "plain":
                    form = outer_key if role == "key" else outer_value
                    sums[mask] = compared[1] ** 2 * _by_block(
                        form(self.attention, delta, x), mask
                    ).to(sums)
            traces[name] += factor * sums.to(traces[name])


def _torch_projections(
    call: AttentionCall, module: nn.MultiheadAttention, blocks: Mapping[str, Blocks]
) -> dict[str, Projection]:
    """The projections of `nn.MultiheadAttention`, which are no modules."""
    prefix = f"{call.module}." if call.module else ""
    fused = module.in_proj_weight is not None
    found = {}
    for index, role in enumerate(("query", "key")):
        x = call.x if role == "query" or call.context is None else call.context
        name, bias = (
            prefix + ("in_proj_weight" if fused else f"{role[0]}_proj_weight"),
            f"{prefix}in_proj_bias",
        )
        if x is None or name not in blocks or x.shape[0] != call.query.shape[0]:
            continue
        projection = Projection(role, name, None, x.detach(), None, blocks[name])
        if bias in blocks:  # that of query, key and value, even where their weights are not fused
            third = torch.arange(blocks[bias].num_blocks) * 3 // blocks[bias].num_blocks
            projection.inputs.append((bias, third == index, torch.ones_like(x[..., :1])))
        if role == "key":  # bias_k and add_zero_attn append rows that have no input
            appended = (0, 0, 0, call.key.shape[-2] - x.shape[1])
            projection.inputs = [
                (name, mask, F.pad(given, appended)) for name, mask, given in projection.inputs
            ]
            own = f"{prefix}bias_k"
            if own in blocks:
                row = (
                    (torch.arange(call.key.shape[-2], device=x.device) == x.shape[1])
                    .to(x)
                    .view(1, -1, 1)
                )
                projection.inputs.append(
                    (
                        own,
                        torch.ones(blocks[own].num_blocks, dtype=torch.bool),
                        row.expand(len(x), -1, 1),
                    )
                )
        found[role] = projection
    return found
