"""What the READMEs show: snippets of Python, and commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import ROOT

READMES = (
    *(ROOT / "README.md", ROOT / "blockopt/README.md", ROOT / "blockopt/analysis/README.md"),
    *(ROOT / "recipes/README.md", ROOT / "benchmarks/README.md"),
)


def snippets(readme: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)


def commands() -> Iterator[list[str]]:
    """The words of every command of every README."""
    for readme in READMES:
        for snippet in snippets(readme, "sh"):
            for line in snippet.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield words


def flags_of(script: str) -> set[str]:
    """The flags that a script, such as "recipes/train.py", is given in the READMEs."""
    found = set()
    for words in commands():
        if script in words:
            given = words[words.index(script) + 1 :]
            found |= {word for word in given if word.startswith("--")}
    return found
