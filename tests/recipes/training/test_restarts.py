"""`torchrun --max-restarts` starts dead ranks again, without `--resume`: their run goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from recipes.training.restarts import RENDEZVOUS, is_restarted, job
from tests.helpers import ROOT
from tests.helpers.faulty_ranks import run_ranks
from tests.helpers.training import flags, losses_of, read_log


def test_only_a_run_of_the_same_launcher_goes_on(tmp_path, monkeypatch):
    lines = [{"kind": "config", "job": "another"}, {"kind": "resumed", "step": 2, "job": job()}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not is_restarted(tmp_path)  # nothing says that this is a restart
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert is_restarted(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of-today")
    assert not is_restarted(tmp_path)
    assert not is_restarted(tmp_path / "empty")


def test_an_attempt_does_not_find_addresses_of_the_one_before(monkeypatch):
    """The launcher keeps its store over restarts, with the addresses of ranks that are dead."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    here = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (where | here).items():
        monkeypatch.setenv(name, value)

    def found():
        return next(rendezvous(RENDEZVOUS, timeout=timedelta(seconds=5)))[0]

    found().set("address", "of the dead")
    assert found().get("address") == b"of the dead"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not found().check(["address"])


def wait_until(condition, process, said):
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.002)


@pytest.mark.distributed
def test_torchrun_restarts_a_run_that_goes_on(tmp_path):
    """Rank 0 is killed, then rank 1; the command ends well, with the losses of a whole run."""
    options = "--steps 60 --checkpoint-every 5 --eval-every 0 --timeout 60"
    log, holder = tmp_path / "run" / "log.jsonl", tmp_path / "run" / "run.holder"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--max-restarts=2", "--standalone", str(ROOT / "recipes" / "train.py")]
    command += flags(tmp_path / "run", tmp_path / "cache", options)
    said = tmp_path / "said.txt"
    with said.open("wb") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        for restarts, step in enumerate((12, 32)):

            def is_there(restarts=restarts, step=step):
                lines = read_log(log) if log.exists() else []
                resumed = sum(line["kind"] == "resumed" for line in lines)
                return resumed == restarts and step in (
                    line["step"] for line in lines if "step" in line
                )

            wait_until(is_there, process, said)
            first = json.loads(holder.read_text())["pid"]
            (second,) = {child.pid for child in psutil.Process(process.pid).children()} - {first}
            os.kill((first, second)[restarts], signal.SIGKILL)
        code = process.wait(timeout=200)
    assert code == 0, said.read_text()
    assert said.read_text().count("The launcher has started this run again: it goes on.") == 2
    assert [line["kind"] for line in read_log(log)].count("resumed") == 2
    plain = flags(tmp_path / "plain", tmp_path / "cache", options)
    assert run_ranks(plain, "ddp")[0] == [0, 0]
    assert losses_of(log) == losses_of(tmp_path / "plain" / "log.jsonl")
