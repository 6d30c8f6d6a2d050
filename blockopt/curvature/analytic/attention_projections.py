"""The projections that feed an attention call, and the curvature of their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt.blocks import Blocks, expand_along
from blockopt.curvature.analytic.attention_forms import (
    AttentionTensors,
    functional_key,
    functional_query,
    outer_key,
    outer_value,
    score_derivatives,
)
from blockopt.curvature.analytic.layer_calls import LayerCall
from blockopt.curvature.analytic.sequence_gradients import LayerGradient, squared_sums
from blockopt.measure.attention_capture import AttentionCall

ROLES = ("query", "key", "value")


class Projection:
    """The part of a weight, and of its bias, that makes the queries, keys or values of a call.

    Args:
        role: "query", "key" or "value".
        weight: The name of the weight.
        x: (B, S, D), what the weight multiplies.
        blocks: The blocks of the weight.
        layer: The call of the linear map, None for `nn.MultiheadAttention`, which has none.

    Attributes:
        inputs: For the weight and for the bias its name, which of its blocks have the role, and
            what it multiplies: (B, S, D), or ones for the bias.
    """

    def __init__(
        self, role: str, weight: str, x: Tensor, blocks: Blocks, layer: LayerCall | None = None
    ) -> None:
        self._mask = torch.tensor([r == role for r in blocks.block_roles])
        self.inputs = [(weight, self._mask, x)]
        if layer is not None and layer.bias is not None:
            self.inputs.append((layer.bias, self._mask, torch.ones_like(x[..., :1])))
        self.layer, self._split = layer, blocks.split

    def heads(self, y: Tensor, width: int) -> Tensor:
        """Return this role's heads of an output, or of a gradient there: (B, heads, S, width)."""
        split = self._split
        if split is not None:
            y = y[..., self._mask[expand_along(torch.arange(split.num_blocks), split)].to(y.device)]
        return y.reshape(*y.shape[:2], -1, width).transpose(1, 2)


def _by_block(values: Tensor, mask: Tensor) -> Tensor:
    """Sum one value per head to one value per block of the mask."""
    return values.view(int(mask.sum()), -1).sum(1)


def _are_heads(name: str, mask: Tensor, heads: int, blocks: Mapping[str, Blocks]) -> bool:
    """Whether the mask fits the parameter, and its blocks are whole heads or groups of them."""
    fits = len(mask) == blocks[name].num_blocks and bool(mask.any())
    return fits and heads % int(mask.sum()) == 0


class AttentionProjections:
    """One attention call with its projections, the linear maps that its module ran just before it.

    Projections that are frozen or not understood are missing.

    Args:
        model: The model that made the call.
        call: The call.
        index: How many attention calls the model had made before.
        layers: The captured layers.
        blocks: The blocks of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        call: AttentionCall,
        index: int,
        layers: list[LayerCall],
        blocks: Mapping[str, Blocks],
    ) -> None:
        self.call = call
        module = model.get_submodule(call.module)
        if isinstance(module, nn.MultiheadAttention) and call.x is not None:
            self._projections = _torch_projections(call, module, blocks)
        else:
            self._projections = _linear_projections(call, index, layers, blocks)
        for role, projection in self._projections.items():
            heads = call.query.shape[1] if role == "query" else self._groups
            projection.inputs = [  # blocks given by the user need not be whole heads
                entry for entry in projection.inputs if _are_heads(*entry[:2], heads, blocks)
            ]

    @cached_property
    def _groups(self) -> int:
        """The number of key heads before any repetition."""
        groups = self.call.key.shape[1]
        for role in ("key", "value"):
            projection = self._projections.get(role)
            if projection is not None and projection.layer is not None:
                width = getattr(self.call, role).shape[-1]
                groups = projection.heads(projection.layer.y[:1], width).shape[1]
        return groups

    @cached_property
    def _tensors(self) -> AttentionTensors:
        return AttentionTensors.of(self.call, self._groups)

    def _compare(self, role: str) -> tuple[Literal["plain", "rotated", "other"], float]:
        """Return how what attention was given differs from the projection's output, and a factor.

        OPT multiplies its queries by the scale of the scores, and RoPE rotates queries and keys.
        """
        layer, given = self._projections[role].layer, getattr(self.call, role)[:1].detach()
        if layer is None:
            return "plain", 1.0
        heads = self._projections[role].heads(layer.y[:1], given.shape[-1])
        repeats = given.shape[1] // heads.shape[1]
        given = given[:, ::repeats].to(heads.dtype)
        factor = float(given.norm() / heads.norm().clamp(min=torch.finfo(heads.dtype).tiny))
        if torch.allclose(given, factor * heads, rtol=1e-3, atol=1e-5):
            return "plain", factor
        norms, expected = given.norm(dim=-1), factor * heads.norm(dim=-1)
        rotated = torch.allclose(norms, expected, rtol=1e-2, atol=1e-5)
        return ("rotated" if rotated else "other"), factor

    def _rotated_probes(
        self, layer: LayerCall, factor: float, num_probes: int | None, generator: torch.Generator
    ) -> list[Tensor]:
        """Return `R_jᵀ r`, (B, H, S, dk), for random signs r or, without `num_probes`, for a basis.

        It is the gradient of `r · k_j` before the rotation.
        """
        key = self.call.key
        basis = torch.eye(key.shape[-1], device=key.device, dtype=key.dtype)
        if num_probes is not None:
            signs = torch.randint(
                0, 2, (num_probes, key.shape[-1]), generator=generator, device=generator.device
            )
            basis = (2 * signs - 1).to(basis) / num_probes**0.5
        sharing = self.call.query.shape[1] // self._groups
        rotated = []
        for r in basis:
            at_key = torch.zeros_like(key)
            at_key[:, :: key.shape[1] // self._groups] = r / factor
            (gradient,) = torch.autograd.grad(key, layer.edge, at_key, retain_graph=True)
            heads = self._projections["key"].heads(layer.to_sequences(gradient), key.shape[-1])
            rotated.append(heads.to(self._tensors.query.dtype).repeat_interleave(sharing, dim=1))
        return rotated

    def add_functional(
        self,
        traces: dict[str, Tensor],
        g: Tensor,
        num_probes: int | None,
        generator: torch.Generator,
    ) -> None:
        """Add the functional part of the query and key blocks to the traces.

        Args:
            traces: `{parameter name: one per block}`.
            g: The gradient of the loss at the attention output.
            num_probes: How many random vectors to draw for rotated keys, None for a basis.
            generator: Draws them.
        """
        query, key = self._projections.get("query"), self._projections.get("key")
        scores = score_derivatives(self._tensors, g.to(self._tensors.weights.dtype))
        if query is not None and (compared := self._compare("query"))[0] != "other":
            per_position = compared[1] ** 2 * functional_query(self._tensors, scores)
            for name, mask, x in query.inputs:
                per_head = (per_position * x.square().sum(-1).unsqueeze(1)).sum((0, 2))
                traces[name][mask] += _by_block(per_head, mask).to(traces[name])
        if key is not None and (compared := self._compare("key"))[0] != "other":
            rotated = None
            if compared[0] == "rotated" and key.layer is not None:
                rotated = self._rotated_probes(key.layer, compared[1], num_probes, generator)
            for name, mask, x in key.inputs:
                per_head = compared[1] ** 2 * functional_key(self._tensors, scores, x, rotated)
                traces[name][mask] += _by_block(per_head, mask).to(traces[name])

    def take_outer(
        self, gradients: dict[str, list[LayerGradient]], delta: Tensor, blocks: Mapping[str, Blocks]
    ) -> dict[str, Tensor]:
        """Return what one factor of Λ adds to the projections, and take them out of `gradients`.

        This holds where nothing above the call mixes positions. `delta` is the factor there.
        """
        delta = delta.to(self._tensors.weights.dtype)
        inputs: dict[str, list[tuple[str, Tensor, Tensor]]] = {}
        for role, projection in self._projections.items():
            for name, mask, x in projection.inputs:
                inputs.setdefault(name, []).append((role, mask, x))
        traces = {}
        for name in [name for name in inputs if len(gradients.get(name, ())) == 1]:
            gradient, split = gradients.pop(name)[0], blocks[name].split
            sums = squared_sums([gradient], split)
            for role, mask, x in inputs[name]:
                if role == "query":
                    local = squared_sums([gradient.by_position()], split)
                    sums = torch.where(mask.to(sums.device), local, sums)
                elif (compared := self._compare(role))[0] == "plain":
                    form = outer_key if role == "key" else outer_value
                    per_head = compared[1] ** 2 * form(self._tensors, delta, x)
                    sums[mask] = _by_block(per_head, mask).to(sums)
            traces[name] = sums
        return traces


def _linear_projections(
    call: AttentionCall, index: int, layers: list[LayerCall], blocks: Mapping[str, Blocks]
) -> dict[str, Projection]:
    """Find the projections among the linear maps that ran just before the call."""
    found = {}
    for layer in layers:
        inside = layer.module.startswith(f"{call.module}.") or not call.module
        if layer.weight is None or layer.attention_calls != index or not inside:
            continue
        for role in set(blocks[layer.weight].roles).intersection(ROLES):
            length = (call.query if role == "query" else call.key).shape[-2]
            if layer.kind == "linear" and layer.x.shape[:2] == (call.query.shape[0], length):
                found[role] = Projection(role, layer.weight, layer.x, blocks[layer.weight], layer)
    return found


def _torch_projections(
    call: AttentionCall, module: nn.MultiheadAttention, blocks: Mapping[str, Blocks]
) -> dict[str, Projection]:
    """Find the projections of `nn.MultiheadAttention`, which are no modules."""
    prefix = f"{call.module}." if call.module else ""
    fused = module.in_proj_weight is not None
    bias, key_bias = f"{prefix}in_proj_bias", f"{prefix}bias_k"
    found = {}
    for index, role in enumerate(("query", "key")):
        x = call.x if role == "query" or call.context is None else call.context
        name = prefix + ("in_proj_weight" if fused else f"{role[0]}_proj_weight")
        if x is None or name not in blocks or x.shape[0] != call.query.shape[0]:
            continue
        projection = found[role] = Projection(role, name, x.detach(), blocks[name])
        if bias in blocks:  # that of query, key and value, even where their weights are not fused
            third = torch.arange(blocks[bias].num_blocks) * 3 // blocks[bias].num_blocks
            projection.inputs.append((bias, third == index, torch.ones_like(x[..., :1])))
        if role == "key":  # bias_k and add_zero_attn append rows that have no input
            length = call.key.shape[-2]
            appended = (0, 0, 0, length - x.shape[1])
            projection.inputs = [
                (name, mask, F.pad(given, appended)) for name, mask, given in projection.inputs
            ]
            if key_bias in blocks:
                row = (torch.arange(length, device=x.device) == x.shape[1]).to(x).view(1, -1, 1)
                mask = torch.ones(blocks[key_bias].num_blocks, dtype=torch.bool)
                projection.inputs.append((key_bias, mask, row.expand(len(x), -1, 1)))
    return found
