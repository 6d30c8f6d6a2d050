"""Blocks from one forward pass: what each weight does, seen where it is used."""

from __future__ import annotations

from typing import Any

from torch import nn

from blockopt.blocks.layouts import Layout, Layouts
from blockopt.blocks.watch.attention import attention_calls, label_attention
from blockopt.blocks.watch.forward_graph import recorded_pass
from blockopt.blocks.watch.linear_maps import linear_maps


def watch(model: nn.Module, example: Any) -> Layouts:
    found: Layouts = {}
    with recorded_pass(model, example) as graph:
        maps = linear_maps(graph)
        calls = attention_calls(graph, maps)
        weights, biases, outputs = label_attention(graph, maps, calls)
        found |= outputs.layouts()
        found |= weights.layouts()
        for bias, layout in biases.layouts().items():
            found[bias] = layout._replace(roles=("bias",) * len(layout.roles))
    return found
