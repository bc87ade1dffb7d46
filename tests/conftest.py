"""How pytest runs the tests: what is slow, in which order, and in which processes."""

import os

# Before torch is imported: tests are small, and two threads that wait for each other on a busy machine make
# them ten times slower. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import importlib
import math
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(f"{Path(__file__).parent}")  # of shared_fixtures, forked_python, load_script, ...
import slow_cases

# What tests make here is recorded in a folder of their own, which processes inherit, and not in the home.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _STATE = tempfile.TemporaryDirectory(prefix="flambeau-state-")
    os.environ["XDG_STATE_HOME"] = _STATE.name

# A shell starts what runs in its background with SIGINT ignored, nohup with SIGHUP, and processes that tests
# start would inherit that.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# The files that take longest, first: processes take whole files, and none shall begin one of these last.
_LONGEST = (
    "test_preemption", "test_export_command", "test_elastic", "test_docs", "test_command", "test_kill_resume",
    "test_planted_causes", "test_hosts", "test_launch", "test_stopping", "test_trial", "test_ways_of_saving",
    "test_site", "test_watchdog", "test_export_from_python", "test_bad_input", "test_model_summary",
    "test_prune_channels", "test_rounded_run", "test_retry_workers", "test_run", "test_run_on_ranks",
    "test_sharded_checkpointer", "test_halving_ranks", "test_launch_command", "test_job_files",
    "test_copy_out", "test_array_source",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Only tests of a GPU see one (`pytest -m gpu -n 0`, or tools/gpu_check): the others are of the CPU."""
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_sessionstart(session: pytest.Session) -> None:
    """What tests share, but not where pytest-xdist only hands them out: torch takes 4 s to load."""
    if not session.config.pluginmanager.hasplugin("dsession"):
        pytest.register_assert_rewrite("shared_fixtures")
        session.config.pluginmanager.register(importlib.import_module("shared_fixtures"))


@pytest.hookimpl(optionalhook=True)  # where that plugin is missing
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """More processes than cores: of their time tests only wait a quarter, and slow ones more than half."""
    return len(os.sched_getaffinity(0)) + (3 if config.option.markexpr == "slow" else 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Nothing of what is collected becomes garbage: looking for some takes a seventh of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Whatever is there now stays: a collection of garbage in a fork would copy a page for each object."""
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """And what the tests of a file have imported: each `gc.collect()` of others would look through it.

    A GPU's memory is given back after each test: that of one which fills it is missing in other processes.
    """
    yield
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """What is frozen would not be freed at the exit, and triton's binding prints what it then finds."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow by tests/slow_cases.py, and order the files for pytest-xdist."""
    cases = Counter[str]()
    for item in items:
        case = item.nodeid.removeprefix("tests/")
        name = case.partition("[")[0]
        cases[name] += 1
        file = name.partition("::")[0]
        fixtures = {f"{file}::{fixture}" for fixture in getattr(item, "fixturenames", ())}
        if (
            cases[name] > slow_cases.CASES.get(name, math.inf)
            or slow_cases.CASES.get(case) == 0
            or not fixtures.isdisjoint(slow_cases.FIXTURES)
        ):
            item.add_marker("slow")
    place = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
