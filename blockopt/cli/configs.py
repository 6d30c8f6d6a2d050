"""The config of a transformers model: by type, from a local file or folder, or from the hub."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockopt.cli.errors import UserError

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def import_transformers() -> Any:
    """Return the module transformers, or raise `UserError` if it is missing."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise UserError("This command needs transformers: pip install 'blockopt[hf]'.") from None


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that replaces entries of the config."""
    replaced = "replace an entry of the config, such as n_layer=2; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=replaced)


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Return `["n_layer=2"]` as `{"n_layer": 2}`: values as JSON, or as text if they are not.

    Raises:
        UserError: If one is not of this form.
    """
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise UserError(f"Invalid --set {setting}. Must be KEY=VALUE, such as n_layer=2.")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def find_config(source: str, overrides: Mapping[str, Any] | None = None, *, hub: bool) -> Any:
    """Return the config of a model.

    Args:
        source: A model type that transformers knows (`gpt2`, `llama`, …), a `config.json`, a folder
            that holds one, or, with `hub`, the name of a model on the hub.
        overrides: Entries to replace.
        hub: Whether to ask the hub for a config that is not found here. Only the config is fetched.

    Raises:
        UserError: If there is no such config, or an entry is wrong.
    """
    transformers, path = import_transformers(), Path(source)
    file = path / "config.json" if path.is_dir() else path
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if file.is_file():
        return _config(transformers, _read(file), overrides or {})
    if source in known and not path.exists():
        return _config(transformers, {"model_type": source}, overrides or {})
    message = (
        f"No model at {source!r}. Must be a model type of transformers {transformers.__version__} "
        "(gpt2, llama, qwen3, …), a config.json, "
    )
    if not hub:
        raise UserError(f"{message}or a folder that holds one. Nothing is downloaded.")
    message += "a folder that holds one, or the name of a model on the hub."
    if path.exists():
        raise UserError(message)
    try:
        found = transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{message}\ntransformers says: {reason}") from None
    return _config(transformers, found.to_dict(), overrides) if overrides else found


def _read(file: Path) -> dict[str, Any]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not JSON: {error}.") from None
    if not isinstance(entries, dict) or "model_type" not in entries:
        raise UserError(f"{file} has no 'model_type'. Must be the config of a transformers model.")
    return entries


def _config(transformers: Any, entries: dict[str, Any], overrides: Mapping[str, Any]) -> Any:
    """Make the config anew, so that what depends on other entries, such as head_dim, follows."""
    kind = entries["model_type"]
    try:
        default = transformers.AutoConfig.for_model(kind)
    except ValueError as error:
        raise UserError(f"No model type {kind!r}: {str(error).splitlines()[0][:200]}") from None
    for key, value in overrides.items():
        sized = key.startswith(("n_", "num_", "vocab", "hidden"))
        if sized and isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UserError(f"Invalid --set {key}={value}. Must be at least 1.")
        if not hasattr(default, key):
            near = difflib.get_close_matches(key, default.to_dict())
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise UserError(f"Invalid --set {key}. Must be an entry of the config of {kind}.{hint}")
    ignored = ("model_type", "dtype", "torch_dtype")
    entries = {k: v for k, v in {**entries, **overrides}.items() if k not in ignored}
    size = entries.get("vocab_size", getattr(default, "vocab_size", None))
    for key in SPECIAL_TOKENS:  # those of the full vocabulary have no place in a smaller one
        number = entries.get(key, getattr(default, key, None))
        if isinstance(number, int) and isinstance(size, int) and number >= size:
            entries[key] = None
    try:
        return transformers.AutoConfig.for_model(kind, **entries)
    except Exception as error:  # of many kinds, from its own checks or from dividing by a size of 0
        reason = " ".join(str(error).split())[:300]  # some have the reason in their second line
        raise UserError(f"transformers refuses this config of {kind}: {reason}") from None
