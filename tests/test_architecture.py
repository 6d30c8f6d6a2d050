"""The rooms of the house: who may import whom, and how long a file may be."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers import ROOT

PACKAGES = ("blockopt", "recipes", "benchmarks")
LONGEST = 400  # lines of a file

# What the rooms of blockopt may import besides themselves, and besides what knows nobody.
KNOWS_NOBODY = {"checks", "errors", "files", "no_trace", "tables"}
MAY_IMPORT = {
    **{room: set() for room in KNOWS_NOBODY},
    "distributed": set(),
    "blocks": set(),
    "optim": {"blocks", "distributed"},
    "measure": {"blocks", "distributed"},
    "curvature": {"measure", "blocks", "distributed"},
    "analysis": {"measure", "blocks", "distributed"},
    "block_lr": {"curvature", "measure", "optim", "blocks", "distributed"},
    "huggingface": {"block_lr", "curvature", "measure", "optim", "blocks", "distributed"},
    "": {"block_lr", "curvature", "measure", "optim", "blocks"},  # blockopt/__init__.py
    "cli": {"", "analysis", "block_lr", "blocks"},
    "__main__": {"cli"},
}


@cache
def modules() -> dict[str, Path]:
    """The file of every module."""
    found = {}
    for path in (path for p in (*PACKAGES, "tests") for path in (ROOT / p).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(modules()[module].read_text())))


@cache
def imports(package: str) -> dict[str, set[str]]:
    """Which modules of ours each module of a package imports, anywhere in it."""
    found = {}
    for module in (name for name in modules() if name.split(".")[0] == package):
        names = set()
        for node in nodes(module):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module} has a relative import"
                given = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in modules() else node.module for name in given}
        found[module] = names & modules().keys()
    return found


def room(module: str) -> str:
    """The room of a module of blockopt, or the package of any other module."""
    package, *rest = module.split(".")
    return package if package != "blockopt" else rest[0] if rest else ""


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_private_modules_and_names_are_used_by_their_own_package_only(package):
    wrong = []
    for name, found in imports(package).items():
        for other in found:
            owner, private, _ = other.partition("._")
            if private and other != "blockopt.__main__" and not name.startswith(f"{owner}."):
                wrong.append(f"{name} imports {other}")
        for node in (n for n in nodes(name) if isinstance(n, ast.ImportFrom)):
            names = [alias.name for alias in node.names if alias.name.startswith("_")]
            if names and package != "tests" and node.module.split(".")[0] in PACKAGES:
                wrong.append(f"{name} imports {names} from {node.module}")
    assert not wrong


def test_arrows_between_the_rooms_of_blockopt_point_down():
    wrong = []
    for name, found in imports("blockopt").items():
        allowed = MAY_IMPORT[room(name)] | KNOWS_NOBODY | {room(name)}
        wrong += [f"{name} imports {other}" for other in found if room(other) not in allowed]
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_cycle(package):
    TopologicalSorter(imports(package)).prepare()  # raises CycleError with the modules of a cycle


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_nobody_edits_the_path_of_imports(package):
    for module in imports(package):
        attributes = [ast.unparse(n) for n in nodes(module) if isinstance(n, ast.Attribute)]
        assert "sys.path" not in attributes, module


def test_files_are_short():
    lengths = {name: path.read_text().count("\n") for name, path in modules().items()}
    long = [f"{name} has {length} lines" for name, length in lengths.items() if length > LONGEST]
    assert not long, ", ".join(long)
