"""The hash of the code that decides a result covers exactly the modules that do."""

import json
import re
import shutil
import subprocess
import sys

from recipes.common.provenance import code_hash, imported_sources
from tests.helpers import ROOT

LOOP = "recipes.comparison.run_loop"


# In a copy of the packages: one new process for all hashes, since each start imports torch.
HASHES = """
import json, sys
from pathlib import Path
from recipes.common import provenance

assert provenance.__file__.startswith(str(Path.cwd()))
for names in json.loads(sys.argv[2]):
    for name in names:
        with Path(name).open("a") as file:
            file.write("# changed\\n")
    print(provenance.code_hash(sys.argv[1]))
"""


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


def test_the_hash_changes_with_a_module_that_decides_and_with_no_other(tmp_path):
    for package in ("blockopt", "recipes"):
        ignored = shutil.ignore_patterns("__pycache__", "*.png")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    others = ["recipes/comparison/report.py", "blockopt/analysis/__init__.py"]
    changes = [[], others, ["recipes/comparison/run_loop.py"], ["blockopt/optim/adamw.py"]]
    command = [sys.executable, "-c", HASHES, LOOP, json.dumps(changes)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before, unchanged, *changed = done.stdout.split()
    assert before == unchanged == code_hash(LOOP)
    assert len({before, *changed}) == 3
