"""Starts the watch in any process of the script as soon as torch has been imported there."""

import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class _AfterTorch(importlib.abc.MetaPathFinder):
    """An import hook that finds torch as usual and starts the watch after its import.

    Many packages only ask whether there is a torch, by `importlib.util.find_spec`, before any imports it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_asking_the_others = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch" or self._is_asking_the_others:
            return None
        self._is_asking_the_others = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self._is_asking_the_others = False
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_watch(module: ModuleType) -> None:
                run(module)
                sys.meta_path.remove(self)
                _begin(self._folder)

            spec.loader.exec_module = run_and_watch  # type: ignore[method-assign]
        return spec


def begin_when_torch_comes(folder: Path) -> None:
    """Watch this process if it imports torch; `folder` is that of the trial, see `plan.py`."""
    sys.meta_path.insert(0, _AfterTorch(folder))


def _begin(folder: Path) -> None:
    from flambeau.tune.watch.changes import apply_changes
    from flambeau.tune.watch.loader_clock import watch_loaders
    from flambeau.tune.watch.plan import Plan
    from flambeau.tune.watch.ptrace_permission import allow_reading
    from flambeau.tune.watch.step_watch import StepWatch
    from flambeau.tune.watch.worker_watch import watch_worker

    plan = Plan.read(folder)
    if plan.learning:
        from flambeau.tune.watch.learning.watch import watch_learning

        watch_learning(folder, plan)
        return
    if plan.is_outside:
        allow_reading()
    on_first_step = apply_changes(plan.change)
    watch = StepWatch(folder, plan, watch_loaders(plan.change, folder), on_first_step)
    watch.install()

    def in_fork() -> None:
        # A forked process may itself train, as with mp.start_processes(start_method="fork").
        watch.restart_in_fork()
        if plan.is_outside:
            allow_reading()  # a fork does not inherit it
        if plan.watches:
            watch_worker(folder, os.getppid(), interrupts=not plan.is_outside)

    os.register_at_fork(after_in_child=in_fork)
    parent = multiprocessing.parent_process()
    # A spawned process imports torch, as part of the user's script, before it knows its parent.
    if plan.watches and (parent is not None or "--multiprocessing-fork" in sys.orig_argv):
        number = None if parent is None else parent.pid
        watch_worker(folder, number or os.getppid(), interrupts=not plan.is_outside)
