"""The hash of the code that decides a result covers exactly the modules that do."""

import re
import shutil
import subprocess
import sys

import pytest

from recipes.common.provenance import code_hash, imported_sources
from tests.helpers import ROOT

LOOP = "recipes.comparison.run_loop"


@pytest.fixture
def copy(tmp_path):
    """A copy of the packages, and a function that hashes the code of the copy in a new process."""
    for package in ("blockopt", "recipes"):
        ignored = shutil.ignore_patterns("__pycache__", "*.png")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)

    def hashed():
        code = "from recipes.common import provenance as p; p.__file__.startswith({!r}) or exit(9)"
        code += f"; print(p.code_hash({LOOP!r}))"
        command = [sys.executable, "-c", code.format(str(tmp_path))]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return tmp_path, hashed


def test_what_decides_a_run_is_in_and_what_shows_it_is_not():
    found = imported_sources(LOOP)
    for name in ("optim", "optim.adamw", "optim.muon", "block_lr.block_lr", "curvature", "blocks"):
        assert f"blockopt.{name}" in found
    for name in ("run_loop", "arms", "run_config", "controls", "tuning"):
        assert f"recipes.comparison.{name}" in found
    for name in ("common.training", "common.gpt2", "common.optimizers", "data.token_data"):
        assert f"recipes.{name}" in found
    for name in ("report", "plots", "rows", "summary", "studies", "workers", "runs"):
        assert f"recipes.comparison.{name}" not in found
    others = ("blockopt.analysis", "blockopt.cli", "blockopt.__main__", "recipes.training")
    assert not [name for name in found if name.startswith(others)]


def test_all_that_a_run_imports_is_in():
    """Found by importing it in a new process, rather than by reading the sources."""
    code = f"import {LOOP}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {name for name in done.stdout.split() if re.match(r"(blockopt|recipes)(\.|$)", name)}
    assert "blockopt.optim.base" in ours
    assert ours <= imported_sources(LOOP).keys()


def test_the_hash_changes_with_a_module_that_decides_and_with_no_other(copy):
    folder, hashed = copy
    before = hashed()
    assert before == code_hash(LOOP)
    for name in ("recipes/comparison/report.py", "blockopt/analysis/__init__.py"):
        with (folder / name).open("a") as file:
            file.write("# changed\n")
    assert hashed() == before
    seen = {before}
    for name in ("recipes/comparison/run_loop.py", "blockopt/optim/adamw.py"):
        with (folder / name).open("a") as file:
            file.write("# changed\n")
        seen.add(hashed())
    assert len(seen) == 3
