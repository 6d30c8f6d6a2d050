"""Where a result comes from: the commit, the code, the libraries and the machine."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import blockopt

OURS = ("blockopt", "recipes")


def git_commit() -> str | None:
    """Return the commit of this repository, with "-dirty" if files differ, or None outside one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of blockopt, of Python and of the packages that are installed."""
    found = {"blockopt": blockopt.__version__, "python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def machine() -> str:
    """Return system, cores and processor in words."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_processor()}"


def _processor() -> str:
    """Return the name of the CPU, where Linux tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"


def code_hash(module: str) -> str:
    """Return a hash of the sources of a module and of all of ours that it imports."""
    digest = hashlib.sha256()
    for name, path in sorted(imported_sources(module).items()):
        digest.update(f"{name} {len(path.read_bytes())}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def imported_sources(module: str) -> dict[str, Path]:
    """Return `{name: file}` of a module and of all of ours that it imports, directly or not.

    Imports are found by reading the sources, also those inside functions.
    """
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _source(name)
        if path is None or name in found:
            continue
        found[name] = path
        waiting += [".".join(name.split(".")[:end]) for end in range(1, name.count(".") + 1)]
        waiting += _imports(path)
    return found


def _source(name: str) -> Path | None:
    """Return the file of one of our modules, or None for anything else."""
    if name.split(".")[0] not in OURS:
        return None
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the parent is a module, and the name something in it
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
