"""Many training runs at once: campaigns say what to run next, and processes run it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockopt.checks import check_count
from recipes.common.errors import UserError
from recipes.comparison.arms import ARMS
from recipes.comparison.run_config import RunConfig
from recipes.comparison.runs import RunResult, run_once
from recipes.comparison.studies import ArmOutcome, Campaign, Study, campaign

Submit = Callable[[RunConfig], "Future[RunResult]"]


class WorkerError(UserError, RuntimeError):
    """A worker process died."""


@contextmanager
def workers(number: int, folder: Path, about: dict[str, Any]) -> Iterator[Submit]:
    """Give a function that hands a run to one of `number` processes; with one, it runs here.

    Args:
        number: How many processes.
        folder: Where the files of the runs go.
        about: What `provenance` returns.
    """
    check_count("number", number)
    for left in folder.glob(".*.part"):  # of runs that were killed
        left.unlink()
    if number == 1:

        def here(config: RunConfig) -> Future[RunResult]:
            future: Future[RunResult] = Future()
            try:
                future.set_result(run_once(config, folder, about))
            except Exception as error:
                future.set_exception(error)
            return future

        yield here
        return
    pool = ProcessPoolExecutor(
        number, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
    )
    try:
        yield lambda config: pool.submit(run_once, config, folder, about)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    parent = multiprocessing.parent_process()

    def follow() -> None:  # otherwise it would wait for work forever once the parent is killed
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def drive(
    campaigns: Sequence[Campaign],
    submit: Submit,
    on_result: Callable[[RunConfig, RunResult], None] = lambda *_: None,
) -> list[ArmOutcome]:
    """Run all campaigns side by side until each has returned its outcome.

    A campaign is sent its results in the order that it asked in, once all of them are there: what
    it asks next does not depend on which worker was faster, so that a repeated or resumed
    comparison does the same runs.

    Args:
        campaigns: Generators of runs.
        submit: Starts a run.
        on_result: Called for each finished run.

    Raises:
        WorkerError: If a worker dies.
        UserError: If a run fails for a reason that the user can mend.
        RuntimeError: If a run fails for another reason; diverging is no failure.
    """
    outcomes: dict[int, ArmOutcome] = {}
    places: dict[Future[RunResult], tuple[int, int, RunConfig]] = {}
    results: dict[int, list[RunResult | None]] = {}

    def ask(number: int, configs: list[RunConfig]) -> None:
        results[number] = [None] * len(configs)
        for place, config in enumerate(configs):
            places[submit(config)] = (number, place, config)

    for number, runs in enumerate(campaigns):
        ask(number, next(runs))
    while places:
        for future in wait(places, return_when=FIRST_COMPLETED).done:
            number, place, config = places.pop(future)
            results[number][place] = _result(future, config)
            on_result(config, results[number][place])  # type: ignore[arg-type]
            if None not in results[number]:
                try:
                    ask(number, campaigns[number].send(list(results[number])))  # type: ignore[arg-type]
                except StopIteration as stop:
                    outcomes[number] = stop.value
    return [outcomes[number] for number in range(len(campaigns))]


def run_study(
    study: Study,
    submit: Submit,
    starts: Mapping[str, Mapping[str, float]],
    on_result: Callable[[RunConfig, RunResult], None] = lambda *_: None,
) -> list[ArmOutcome]:
    """Run all arms of a study, the controls last, as they take tuned values from the others.

    Args:
        study: The protocol.
        submit: Starts a run.
        starts: `{arm: hyperparameters}` to start tuning at, such as the best of a smaller model.
        on_result: Called for each finished run.
    """
    outcomes: list[ArmOutcome] = []
    for are_controls in (False, True):
        arms = [ARMS[name] for name in study.arms if (ARMS[name].base is not None) == are_controls]
        tuned = {outcome.arm.name: outcome.values for outcome in outcomes}
        runs = [
            campaign(study, arm, starts.get(arm.name), tuned.get(arm.base or "")) for arm in arms
        ]
        outcomes += drive(runs, submit, on_result)
    return outcomes


def _result(future: Future[RunResult], config: RunConfig) -> RunResult:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise WorkerError(
            "A worker process died, perhaps for lack of memory. The same command goes on from here."
        ) from error
    except UserError:
        raise
    except Exception as error:
        values = ", ".join(f"{name}={value:g}" for name, value in config.values)
        run = f"{config.arm} with {values}, seed {config.seed}, {config.steps} steps"
        raise RuntimeError(f"The run of {run} failed: {error}") from error
