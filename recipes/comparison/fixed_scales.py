"""Multipliers of learning rates that stay what they are: of roles, of layers, of kinds of tokens.

| name | what its multiplier applies to |
|---|---|
| `value` | the blocks of a role |
| `value.2` | those in one layer |
| `embedding.rare` | the embedding's rows of rare tokens |

Tokens, sorted by how often they stand in the text, are `frequent`, `common`, `uncommon` or `rare`:
each of the four kinds makes a quarter of the text.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import blockopt
from blockopt.blocks import per_block

QUARTERS = ("frequent", "common", "uncommon", "rare")


def fixed_scales(
    model: nn.Module, scales: Mapping[str, float], tokens: Tensor | None = None
) -> dict[str, Tensor]:
    """Return a scale for every block of a model, 1 where no name applies.

    Args:
        model: Any model whose blocks can be found by names.
        scales: `{name: multiplier}`, as in the table above.
        tokens: The text, which names of quarters need.

    Raises:
        ValueError: If a name fits no block.

    Example:
        >>> layer = nn.TransformerEncoderLayer(4, 1, 8)
        >>> fixed_scales(layer, {"key": 2.0})["self_attn.in_proj_weight"]
        tensor([1., 2., 1.])
    """
    unused, result = set(scales), {}
    for name, entry in blockopt.find_blocks(model).items():
        values = []
        for role in entry.roles:
            known = [label for label in (f"{role}.{entry.layer}", role) if label in scales]
            unused -= set(known)
            values.append(scales[known[0]] if known else 1.0)
        result[name] = per_block(values, entry)
        if tokens is not None and entry.roles == ("embedding",) and unused:
            quarter = token_quarters(tokens, len(result[name]))
            for number, label in enumerate(QUARTERS):
                unused.discard(f"embedding.{label}")
                result[name][quarter == number] *= scales.get(f"embedding.{label}", 1.0)
    if unused:
        raise ValueError(f"Invalid scales {sorted(unused)}. The model has no such blocks.")
    return result


def token_quarters(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return for each token the quarter of the text that it belongs to, 0 for the most frequent.

    Example:
        >>> token_quarters(torch.tensor([2, 2, 2, 2, 0, 0, 1, 3]), 5)
        tensor([2, 3, 0, 3, 3])
    """
    counts = torch.bincount(tokens.flatten().long(), minlength=vocabulary).double()
    order = counts.argsort(descending=True, stable=True)
    before = counts[order].cumsum(0) - counts[order]
    quarters = torch.empty(vocabulary, dtype=torch.long)
    quarters[order] = (before / counts.sum() * len(QUARTERS)).long().clamp(max=len(QUARTERS) - 1)
    return quarters
