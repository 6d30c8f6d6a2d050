"""Every recipe starts as a file and as a module; those of benchmarks have tests of their own."""

import re
import runpy
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.helpers.readmes import flags_of

SCRIPTS = ("train", "train_hf", "compare", "figures", "prepare_data", "block_lr_demo")
SCRIPTS += ("sensitivity", "walk_through")


def run(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300
    )


def test_only_entry_points_stand_at_the_top_of_recipes():
    assert {path.stem for path in (ROOT / "recipes").glob("*.py")} == {"__init__", *SCRIPTS}


@pytest.mark.parametrize("way", ["file", "module"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, way, monkeypatch, capsys):
    """Started in this process, which has loaded torch: a new one would take seconds for each."""
    path, module = ROOT / "recipes" / f"{script}.py", f"recipes.{script}"
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)
    start, target = (runpy.run_path, str(path)) if way == "file" else (runpy.run_module, module)
    with pytest.raises(SystemExit) as stop:
        start(target, run_name="__main__")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {script}.py")
    assert flags_of(f"recipes/{script}.py") <= set(re.findall(r"--[a-z-]+", shown))


@pytest.mark.parametrize("way", ["file", "module"])
def test_a_script_starts_in_any_folder(way, tmp_path):
    start = ["-m", "recipes.prepare_data"]
    start = [ROOT / "recipes" / "prepare_data.py"] if way == "file" else start
    done = run(*start, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: prepare_data.py")


def test_block_lr_prints_the_scales_and_draws_them(tmp_path):
    done = run("recipes/block_lr_demo.py", "--steps", 12, "--every", 5, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mlp_out" in done.stdout
    assert (tmp_path / "block_lr.png").stat().st_size > 10_000
    rows = (tmp_path / "block_lr.csv").read_text().splitlines()
    assert rows[0] == "step,block,curvature,scale"
    assert {row.split(",")[0] for row in rows[1:]} == {"1", "6", "11"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["figures", "--figure", "1", "--tiny", "--out", "FILE"],
        ["walk_through", "--out", "FILE"],
        ["block_lr_demo", "--output", "FILE"],
        ["block_lr_demo", "--lr", "nan"],
        ["sensitivity", "--seeds", "0"],
        ["sensitivity", "--workers", "0"],
    ],
    ids=" ".join,
)
def test_mistakes_of_a_user_are_one_line(arguments, tmp_path, monkeypatch, capsys):
    script, *flags = arguments
    file = tmp_path / "file"
    file.touch()
    path = ROOT / "recipes" / f"{script}.py"
    monkeypatch.setattr(
        sys, "argv", [str(path), *(str(file) if word == "FILE" else word for word in flags)]
    )
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in last
    assert str(file) in last or "FILE" not in flags


def test_bad_arguments_are_refused():
    done = run("recipes/block_lr_demo.py", "--curvature", "guess")
    assert done.returncode == 2
    assert "error" in done.stderr
