"""Hand-written models in the many styles of research code, and the blocks that each should have.

`RESEARCH[name]` is `(build, example, expected)`: no name in these models tells what a weight does,
and most would be refused without a forward pass.
"""

from __future__ import annotations

import torch
from torch import nn

from tests.helpers.research_models import attention_kinds as kinds
from tests.helpers.research_models import layers, low_rank, mixing, storage, without_softmax
from tests.helpers.research_models import shut_and_merged as shut
from tests.helpers.research_models.layers import Letters
from tests.helpers.research_models.parts import D, H, features, image, memory, tokens

__all__ = ["RESEARCH", "D", "H", "Letters", "research_model", "tokens"]

RESEARCH = {
    "letters": (layers.Letters, tokens, layers.LETTERS),
    "einsum": (storage.Einsum, tokens, storage.EINSUM),
    "matrices": (storage.Matrices, features, storage.MATRICES),
    "head-by-head": (storage.HeadByHead, features, storage.HEAD_BY_HEAD),
    "stacked-heads": (storage.StackedHeads, features, storage.STACKED_HEADS),
    "interleaved": (storage.Interleaved, features, storage.INTERLEAVED),
    "heads-last": (storage.HeadsLast, features, storage.HEADS_LAST),
    "rotary-grouped": (kinds.RotaryGrouped, features, kinds.ROTARY_GROUPED),
    "columns": (storage.Columns, lambda: features()[0].T, storage.COLUMNS),
    "cross-attending": (kinds.CrossAttending, memory, kinds.CROSS_ATTENDING),
    "convolutions": (layers.Convolutions, image, layers.CONVOLUTIONS),
    "parametrized": (kinds.Parametrized, features, kinds.PARAMETRIZED),
    "multi-query": (kinds.MultiQuery, features, kinds.MULTI_QUERY),
    "latent": (kinds.Latent, features, kinds.LATENT),
    "gated": (kinds.Gated, features, kinds.GATED),
    "convolved": (kinds.Convolved, features, kinds.CONVOLVED),
    "experts": (layers.Experts, features, layers.EXPERTS),
    "soft-experts": (layers.SoftExperts, features, layers.SOFT_EXPERTS),
    "scanned": (storage.Scanned, features, storage.SCANNED),
    "mapped": (storage.Mapped, features, storage.MAPPED),
    "in-one-stack": (storage.InOneStack, features, storage.IN_ONE_STACK),
    "differential": (kinds.Differential, features, kinds.DIFFERENTIAL),
    "talking-heads": (kinds.TalkingHeads, features, kinds.TALKING_HEADS),
    "complex-rotary": (kinds.ComplexRotary, features, kinds.COMPLEX_ROTARY),
    "sliding-window": (kinds.SlidingWindow, features, kinds.SLIDING_WINDOW),
    "gated-unit": (kinds.GatedUnit, features, kinds.GATED_UNIT),
    "learned-keys": (kinds.LearnedKeys, features, kinds.LEARNED_KEYS),
    "parallel": (layers.Parallel, features, layers.PARALLEL),
    "parallel-in-one": (layers.ParallelInOne, features, layers.PARALLEL_IN_ONE),
    "one-output": (layers.OneOutput, features, layers.ONE_OUTPUT),
    "universal": (layers.Universal, tokens, layers.UNIVERSAL),
    "depths": (layers.Depths, features, layers.DEPTHS),
    "normalized": (layers.Normalized, tokens, layers.NORMALIZED),
    "latents": (layers.Latents, lambda: features()[..., :7], layers.LATENTS),
    "patches": (layers.Patches, image, layers.PATCHES),
    "shared-map-in": (low_rank.SharedMapIn, features, low_rank.SHARED_MAP_IN),
    "factored": (low_rank.Factored, features, low_rank.FACTORED),
    "side-paths": (low_rank.SidePaths, features, low_rank.SIDE_PATHS),
    "sets": (low_rank.Sets, features, low_rank.SETS),
    "biases": (low_rank.Biases, features, low_rank.BIASES),
    "few-tokens": (mixing.FewTokens, features, mixing.FEW_TOKENS),
    "channels": (mixing.Channels, features, mixing.CHANNELS),
    "pixels": (mixing.Pixels, features, mixing.PIXELS),
    "hardly-tied": (mixing.HardlyTied, features, mixing.HARDLY_TIED),
    "neighbours": (mixing.Neighbours, features, mixing.NEIGHBOURS),
    "slots": (mixing.Slots, features, mixing.SLOTS),
    "chosen-heads": (shut.ChosenHeads, features, shut.CHOSEN_HEADS),
    "gain-per-head": (shut.GainPerHead, features, shut.GAIN_PER_HEAD),
    "biased-experts": (shut.BiasedExperts, features, shut.BIASED_EXPERTS),
    "merged": (shut.Merged, features, shut.MERGED),
    "retention": (without_softmax.Retention, features, without_softmax.RETENTION),
    "forgetting": (without_softmax.Forgetting, features, without_softmax.FORGETTING),
    "linear-attention": (without_softmax.LinearAttention, features, without_softmax.LINEAR),
    "efficient-attention": (without_softmax.Efficient, features, without_softmax.EFFICIENT),
}


def research_model(name: str) -> nn.Module:
    """The seeded model of that name, in training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return RESEARCH[name][0]()
