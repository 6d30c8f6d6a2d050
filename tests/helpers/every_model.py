"""Every model type of transformers and timm, small, on the `meta` device, and its roles' shares."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from blockopt.blocks import Blocks, UnknownBlocksError, block_numel, find_blocks, per_block
from tests.helpers import ROOT
from tests.helpers.models import timm_vision_transformer

AUTO_CLASSES = (
    *("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"),
    *("AutoModelForImageTextToText", "AutoModelForImageClassification"),
    *("AutoModelForSpeechSeq2Seq", "AutoModelForCTC", "AutoModelForAudioClassification"),
    *("AutoModelForObjectDetection", "AutoModelForPreTraining", "AutoModel"),
)
NUMBER_OF_LAYERS = re.compile(r"(num_|n_|.*_)?layers?|depth|num_(.*_)?(layers|blocks)")


def transformers_types() -> list[str]:
    return list(CONFIG_MAPPING_NAMES)


def timm_names() -> list[str]:
    """The smallest model of each family of timm."""
    timm_vision_transformer()
    import timm

    names: dict[str, str] = {}
    for name in timm.list_models():
        family = timm.models._registry._model_to_module[name]
        names.setdefault(f"{family}/{re.match('[a-z]+', name)[0]}", name)
    return list(names.values())


def build_transformers(kind: str) -> nn.Module | None:
    """Build a model of a type with two layers of each kind, or None if its default cannot be."""
    timm_vision_transformer()  # some configs import timm
    for small in (True, False):
        with silent(), contextlib.suppress(Exception):
            config = CONFIG_MAPPING[kind]()
            if small:
                shrink_depth(config)
            auto = auto_class(config)
            if auto is None:
                return None
            with torch.device("meta"):
                return auto.from_config(config)
    return None


def auto_class(config: Any) -> Any:
    """The first of the auto classes that builds a model of a config, or None."""
    autos = (getattr(transformers, name) for name in AUTO_CLASSES)
    return next((a for a in autos if type(config) in a._model_mapping), None)


def build_timm(name: str) -> nn.Module:
    timm_vision_transformer()
    import timm

    with silent(), torch.device("meta"):
        return timm.create_model(name, pretrained=False)


@contextlib.contextmanager
def silent():
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            transformers.logging.set_verbosity(level)
            logging.disable(logging.NOTSET)


def shrink_depth(config: Any, depth: int = 0) -> None:
    """Leave two layers of each kind."""
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig) and depth < 4:
            shrink_depth(value, depth + 1)
        elif name == "layer_types" and isinstance(value, list) and len(value) > 2:
            kinds = list(dict.fromkeys(value))
            number = max(2, len(kinds))
            with contextlib.suppress(Exception):
                config.layer_types, config.num_hidden_layers = (kinds * 2)[:number], number
        elif type(value) is int and value > 2 and NUMBER_OF_LAYERS.fullmatch(name):
            with contextlib.suppress(Exception):
                setattr(config, name, 2)


SHARES = ROOT / "tests" / "data" / "role_shares.json"


def shares_of(model: nn.Module) -> dict[str, float]:
    """The shares of the roles; those of the overrides that a refusal asks for, marked as such.

    Raises:
        ValueError: If these overrides do not settle it.
    """
    try:
        return role_shares(model, find_blocks(model))
    except UnknownBlocksError as error:
        found = find_blocks(model, overrides=error.overrides)
        return {**role_shares(model, found), "refused": len(error.overrides)}


def all_shares(library: str) -> dict[str, dict[str, float]]:
    """The shares of every model of "transformers" or "timm" that can be built."""
    if library == "timm":
        return {name: shares_of(build_timm(name)) for name in timm_names()}
    models = ((kind, build_transformers(kind)) for kind in transformers_types())
    return {kind: shares_of(model) for kind, model in models if model is not None}


def write_shares() -> None:
    """Write the table anew, for a reader to look through what has changed."""
    lines = []
    for library in ("transformers", "timm"):
        rows = all_shares(library).items()
        inside = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows)
        lines.append(f"{json.dumps(library)}: {{\n{inside}\n}}")
    SHARES.write_text("{" + ",\n".join(lines) + "}\n")


def role_shares(model: nn.Module, blocks: dict[str, Blocks]) -> dict[str, float]:
    """The share of each role in the weights, in percent."""
    totals: dict[str, int] = {}
    parameters = dict(model.named_parameters())
    for name, entry in blocks.items():
        numel = block_numel(tuple(parameters[name].shape), entry.split)
        numbers = per_block(list(range(len(entry.roles))), entry)
        sums = torch.bincount(numbers, weights=numel.double()).tolist()
        for role, total in zip(entry.roles, sums):
            totals[role] = totals.get(role, 0) + int(total)
    total = sum(totals.values())
    shares = {role: round(100 * totals[role] / total, 1) for role in sorted(totals)}
    return {role: share for role, share in shares.items() if share >= 0.1}


if __name__ == "__main__":
    write_shares()
