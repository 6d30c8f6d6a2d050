"""Every benchmark runs, and refuses bad arguments in one line."""

import json
import runpy
import subprocess
import sys

import pytest

from tests.helpers import ROOT

# In a library that curvlinops imports, which may be imported here first.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")

SCRIPTS = ("step_time", "memory", "curvature_cost", "hessian_speed", "distributed", "training_step")


def start(monkeypatch, script, *arguments):
    """What `python -m` does, without a new process, which would take seconds to import torch."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, f"benchmarks.{script}", raising=False)
        runpy.run_module(f"benchmarks.{script}", run_name="__main__")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("script", "row"),
    [
        *zip(
            SCRIPTS,
            ("BlockMuon", "BlockMuon", "hutchinson", "curvlinops", "70B, 1024", "BlockMuon"),
        )
    ],
)
def test_writes_table_json_and_chart(script, row, tmp_path, monkeypatch, capsys):
    output, plot = tmp_path / "out.json", tmp_path / "out.png"
    start(monkeypatch, script, "--quick", "--output", output, "--plot", plot)
    assert row in capsys.readouterr().out
    assert json.loads(output.read_text())
    assert plot.stat().st_size > 10_000


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        start(monkeypatch, script, "--help")
    assert stopped.value.code == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("step_time", ("--rounds", 0), "must be at least 1"),
        ("curvature_cost", ("--batch", 0), "must be at least 1"),
        ("memory", ("--output", "results.txt"), "Must end in .json"),
        ("hessian_speed", ("--plot", ROOT / "pyproject.toml" / "x.png"), "Cannot write"),
        ("memory", ("--guess",), "unrecognized arguments: --guess"),
    ],
)
def test_bad_arguments_are_one_line(script, arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        start(monkeypatch, script, *arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_script_starts_as_a_file_from_any_folder(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "step_time.py"), "--rounds", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
