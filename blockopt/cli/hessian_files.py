"""The files of `blockopt hessian`: the report as JSON, as a table, and as a page with its plots."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import blockopt
from blockopt.analysis.formatting import plain
from blockopt.analysis.model_report import HessianReport
from blockopt.blocks import Blocks
from blockopt.cli.configs import import_transformers
from blockopt.cli.local_model import Corpus, LocalModel


def describe_measurement(
    options: argparse.Namespace, source: LocalModel, corpus: Corpus, dtype: str, notes: list[str]
) -> dict[str, Any]:
    """Return how the numbers came about."""
    return {
        "options": {key: value for key, value in vars(options).items() if key != "command"},
        "model": type(source.model).__name__,
        "weights": source.weights,
        "parameters": sum(p.numel() for p in source.model.parameters()),
        "dtype": dtype,
        "tokens": corpus.tokens,
        "config": source.model.config.to_dict(),  # type: ignore[operator, union-attr]
        "versions": {
            "blockopt": blockopt.__version__,
            "torch": torch.__version__,
            "transformers": import_transformers().__version__,
            "python": platform.python_version(),
        },
        "notes": notes,
    }


def write_report(
    folder: Path,
    report: HessianReport,
    record: Mapping[str, Any],
    model: nn.Module,
    blocks: Mapping[str, Blocks],
) -> list[Path]:
    """Write all files, and return their paths; partial results are no longer needed then."""
    paths = [folder / "report.json", folder / "blocks.csv"]
    text = json.dumps({**plain(record), "report": report.to_dict()}, indent=1, allow_nan=False)
    _write(paths[0], f"{text}\n".encode())
    rows = report.rows()
    columns = max(rows, key=len)  # small blocks have fewer tops
    with paths[1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
    if importlib.util.find_spec("matplotlib") is None:
        print("Note: no plots without matplotlib: pip install 'blockopt[recipes]'.")
    else:
        from blockopt.cli.hessian_page import page, pictures

        plots = pictures(report, f"{record['model']}, {record['weights']}")
        files = {**plots, "report.html": page(report, record, model, blocks, plots).encode()}
        for name, content in files.items():
            _write(folder / name, content)
            paths.append(folder / name)
    (folder / "partial.pt").unlink(missing_ok=True)
    return paths


def _write(path: Path, content: bytes) -> None:
    """Write a file under another name first: who reads it sees all of it, or what was before."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)
