"""Every script runs, and refuses bad arguments at once."""

import json
import subprocess
import sys

import pytest

from tests.helpers import ROOT


def run(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300
    )


def test_block_lr_prints_the_scales_and_draws_them(tmp_path):
    done = run("recipes/block_lr_demo.py", "--steps", 12, "--every", 5, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mlp_out" in done.stdout
    assert (tmp_path / "block_lr.png").stat().st_size > 10_000
    rows = (tmp_path / "block_lr.csv").read_text().splitlines()
    assert rows[0] == "step,block,curvature,scale"
    assert {row.split(",")[0] for row in rows[1:]} == {"1", "6", "11"}


@pytest.mark.parametrize(
    ("script", "arm"),
    [
        ("step_time", "BlockMuon"),
        ("memory", "BlockMuon"),
        ("curvature_cost", "hutchinson"),
        ("hessian_speed", "curvlinops"),
    ],
)
def test_benchmark_writes_its_table_and_json(script, arm, tmp_path):
    output, plot = tmp_path / "out.json", tmp_path / "out.png"
    done = run(f"benchmarks/{script}.py", "--quick", "--output", output, "--plot", plot)
    assert done.returncode == 0, done.stderr
    assert arm in done.stdout
    assert json.loads(output.read_text())
    assert plot.stat().st_size > 10_000


@pytest.mark.parametrize(
    "arguments",
    [
        ("recipes/block_lr_demo.py", "--curvature", "guess"),
        ("benchmarks/step_time.py", "--rounds", 0),
        ("benchmarks/curvature_cost.py", "--batch", 0),
    ],
)
def test_bad_arguments_are_refused(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "error" in done.stderr


@pytest.mark.parametrize(
    "script",
    [
        *("recipes/block_lr_demo.py", "recipes/train.py", "recipes/train_hf.py"),
        *(
            "benchmarks/step_time.py",
            "benchmarks/memory.py",
            "benchmarks/curvature_cost.py",
            "benchmarks/hessian_speed.py",
        ),
    ],
)
def test_help(script):
    assert "usage" in run(script, "--help").stdout
