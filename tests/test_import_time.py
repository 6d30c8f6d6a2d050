"""`import blockopt` is quick: it adds little to `import torch`, and above all not the compiler."""

import re
import subprocess
import sys

HEAVY = ("torch._dynamo", "matplotlib", "transformers", "sympy")


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def test_import_adds_no_heavy_module():
    before = "import sys, torch; before = set(sys.modules); import blockopt"
    added = set(run(f"{before}; print(*set(sys.modules) - before)").stdout.split())
    assert "blockopt.curvature" in added
    assert added.isdisjoint(HEAVY)


def test_import_takes_little_more_time_than_torch_alone():
    """Half of torch's own time in the same run will do where the machine is slow or busy."""
    report = run("import torch, blockopt", "-X", "importtime").stderr
    seconds = {
        name: int(microseconds) / 1e6
        for microseconds, name in re.findall(r"\| +(\d+) \| (torch|blockopt)$", report, re.M)
    }
    assert seconds["blockopt"] < max(0.4, seconds["torch"] / 2)
