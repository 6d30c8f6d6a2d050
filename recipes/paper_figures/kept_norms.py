"""A file of measured norms, so that a figure of hours goes on after a kill and is drawn again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blockopt.analysis.closed_forms.attention_growth import BlockPart

Measure = Callable[[float, int], Mapping[Any, float]]


class KeptNorms:
    """Norms by setting, scale and seed, on lines of JSON.

    A line `{"setting": ..., "labels": [...]}` stands before its measurements, one list per line:
    scale, seed, and a norm for each label. The file does not know the code that measured: delete it
    when that changes.

    Args:
        path: The file. What it holds is not measured again.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._labels = path, dict[str, list[Any]]()
        self._norms: dict[tuple[str, float, int], list[float]] = {}
        self._last = ""  # the setting that the next line of the file would belong to
        if path.exists():
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # a kill may have cut off the last line
            if whole != text:
                path.write_text(whole, encoding="utf-8")
            for line in whole.splitlines():
                self._read(json.loads(line))

    def through(self, measure: Measure, setting: str) -> Measure:
        """Return `measure` with the file before it.

        Args:
            measure: Returns the norms at a scale, with the random numbers of a seed.
            setting: All else that the norms depend on.
        """

        def kept(scale: float, seed: int) -> Mapping[Any, float]:
            key = (setting, round(scale, 9), seed)
            if key not in self._norms:
                found = measure(scale, seed)
                norms = [float(f"{norm:.6e}") for norm in found.values()]
                if self._last != setting:
                    self._write({"setting": setting, "labels": list(found)})
                self._write([*key[1:], *norms])
            return dict(zip(self._labels[setting], self._norms[key]))

        return kept

    def _read(self, line: Any) -> None:
        if isinstance(line, dict):
            self._last = line["setting"]
            labels = line["labels"]
            self._labels[self._last] = [BlockPart(*x) if isinstance(x, list) else x for x in labels]
        else:
            scale, seed, *norms = line
            self._norms[self._last, scale, seed] = norms

    def _write(self, line: Any) -> None:
        text = json.dumps(line, ensure_ascii=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
        self._read(json.loads(text))
