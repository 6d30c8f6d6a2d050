"""Any model type of transformers with narrow layers and real weights, and a batch that it runs on.

Default configs are shrunk: two layers of each kind, a small vocabulary, and widths divided by a
common factor, so that what a family computes with them keeps its form.
"""

from __future__ import annotations

import contextlib
import inspect
import re

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.helpers.every_model import auto_class, shrink_depth, silent
from tests.helpers.models import timm_vision_transformer

WIDTH = re.compile(r".*(size|dim|dims|d_model|embd|inner|d_ff|d_kv|channels|width|rank)")
NO_WIDTH = re.compile(
    r"image|patch|kernel|num_|window|chunk|block|max_|type_|state_size|in_channels|bins|mel"
)
VOCABULARY, LARGEST = 300, 120e6


def tiny_transformer(kind: str, factor: int = 8, **changes: object) -> nn.Module:
    """A model of a type, its weights far from zero so that changes show.

    Args:
        kind: A model type of transformers.
        factor: What widths are divided by.
        changes: What else to change in the config.
    """
    timm_vision_transformer()  # some configs import timm
    with silent(), torch.random.fork_rng():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[kind](**changes)
        shrink_depth(config)
        _shrink_widths(config, factor)
        auto = auto_class(config)
        with torch.device("meta"):
            size = sum(p.numel() for p in auto.from_config(config).parameters())
        if size > LARGEST:
            raise ValueError(f"{kind} has {size / 1e6:.0f} million parameters.")
        model = auto.from_config(config).eval()
        scatter(model)
    return model


def scatter(model: nn.Module) -> None:
    """Give all matrices normal entries, whatever a model starts with."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.2, generator=generator)


def _shrink_widths(config: transformers.PretrainedConfig, factor: int, depth: int = 0) -> None:
    for name, value in list(vars(config).items()):
        with contextlib.suppress(Exception):  # configs check what they are given
            if isinstance(value, transformers.PretrainedConfig) and depth < 4:
                _shrink_widths(value, factor, depth + 1)
            elif name.endswith("vocab_size") and isinstance(value, int):
                setattr(config, name, min(value, VOCABULARY))
            elif name.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
                setattr(config, name, 2)
            elif WIDTH.fullmatch(name) and not NO_WIDTH.search(name):
                setattr(config, name, _divided(value, factor))


def _divided(value: object, factor: int) -> object:
    if type(value) is int and value >= 64 and value % factor == 0:
        return value // factor
    if isinstance(value, list) and value and all(type(_divided(v, factor)) is int for v in value):
        divided = [_divided(v, factor) for v in value]
        return value if any(a == b for a, b in zip(value, divided)) else divided
    return value


def batch_of(model: nn.Module) -> dict[str, Tensor]:
    """Random tokens, pixels or sound, as the model calls its main input."""
    generator = torch.Generator().manual_seed(0)
    config, main = model.config, model.main_input_name
    arguments = inspect.signature(model.forward).parameters
    batch: dict[str, Tensor] = {}
    if main.endswith("input_ids"):
        name = "input_ids" if "input_ids" in arguments else main
        batch[name] = torch.randint(3, VOCABULARY - 10, (2, 8), generator=generator)
    elif main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size, channels = getattr(vision, "image_size", 64), getattr(vision, "num_channels", 3)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        batch[main] = torch.randn(1, channels, height, width, generator=generator)
    elif main == "input_values":
        batch[main] = torch.randn(1, 4000, generator=generator)
    elif main == "input_features":
        length = 2 * getattr(config, "max_source_positions", 100)
        bins = getattr(config, "num_mel_bins", 80)
        batch[main] = torch.randn(1, bins, length, generator=generator)
    else:
        raise ValueError(f"Nobody knows what {main} is.")
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in arguments:
        rows = len(next(iter(batch.values())))
        batch["decoder_input_ids"] = torch.randint(3, 290, (rows, 5), generator=generator)
    if getattr(config, "use_cache", False) and "use_cache" in arguments:
        batch["use_cache"] = False  # type: ignore[assignment]
    return batch
