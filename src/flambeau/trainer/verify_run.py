"""`flambeau verify` for a run: changes nothing in it, and runs no code that it names."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flambeau.errors import InputError
from flambeau.provenance import named_code
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    CheckpointDamaged,
    checkpoint_folders,
    verify_checkpoint,
)
from flambeau.run.folder.checkpointer import check_name
from flambeau.run.folder.identity import POWERSGD_FORGETS, changes, exactness_facts
from flambeau.run.folder.json_file import dataset_facts, json_table
from flambeau.run.folder.metrics_log import crc32_of
from flambeau.run.folder.published_weights import Result, are_whole, published
from flambeau.run.folder.run_folder import RunFolder
from flambeau.trainer.parts.data import (
    DataFacts,
    check_model_file,
    check_test,
    check_unchanged,
    open_data,
)
from flambeau.trainer.parts.device import pick_device, use_threads
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.stored_settings import from_stored
from flambeau.weights.safetensors_file import read_safetensors


@dataclass(frozen=True)
class Verification:
    """Lines for the user; `good` if everything is whole and a resume would be exact."""

    lines: Sequence[str]
    good: bool


def verify_run(path: Path) -> Verification:
    """Verify every checkpoint, and compare what a resume depends on with the present."""
    folder = RunFolder(path)
    stored = folder.read_existing()
    lines: list[str] = []
    damaged = 0
    newest = None
    for checkpoint in checkpoint_folders(folder.checkpoints):
        try:
            meta = verify_checkpoint(checkpoint)
            check_name(checkpoint, meta)
            newest = meta
            lines.append(f"{checkpoint.name}: whole")
        except CheckpointDamaged as error:
            damaged += 1
            lines.append(f"{checkpoint.name}: DAMAGED: {error.name} {error.what}")
    result = published(folder)
    if result is not None:
        said, whole = _published_weights(folder, result)
        lines.append(f"model.safetensors: {said} ({result.weights} weights, step {result.step})")
        if not whole and not damaged and result.weights != "soup":
            lines.append(
                "remove result.json and start the command of the run again: it writes model.safetensors from "
                "its checkpoint"
            )
        lost = _lost_metrics(folder, newest or {})
        if not lost and newest is not None and not damaged:
            lost = _added_metrics(folder, newest)
        lost += _unreadable_facts(folder, stored)
        lost += _unreadable_soup(folder, result)
        lines += [f"DAMAGED: {reason}" for reason in lost]
        lines.append("finished: there is nothing to resume")
        return Verification(lines, good=not damaged and whole and not lost)
    if folder.weights.exists():
        lines.append(
            "model.safetensors: not verified, as result.json is missing, which says of which step it is; the "
            "command of the run writes both at its end"
        )
    why = _inexact(folder, stored, newest)
    if why:
        lines += [f"a resume would not be exact: {reason}" for reason in why]
    elif newest is not None:
        anywhere = ""
        if stored.get("parts") is not None:
            threads = newest["exactness"]["threads"]
            anywhere = f", on any number of processes with OMP_NUM_THREADS={threads}"
        elif stored.get("portable_bits") is not None:
            anywhere = ", on any x86-64 processor with AVX2"
        lines.append(f"a resume would be exact, from step {newest['step']}{anywhere}")
        data = named_code(stored).get("data")
        if data is not None:
            lines.append(f"if {data} still gives the same images: it is code, and was not run")
    return Verification(lines, good=not damaged and not why)


def _published_weights(folder: RunFolder, result: Result) -> tuple[str, bool]:
    """What the published weights are, and whether that is well."""
    if not folder.weights.exists():
        return "MISSING", False
    whole = are_whole(folder, result)
    if whole is None:
        read_safetensors(folder.weights)
        return "readable", True
    return ("whole" if whole else "DAMAGED, not what the run has left"), whole


def _inexact(folder: RunFolder, stored: dict[str, Any], newest: dict[str, Any] | None) -> list[str]:
    """Why a resume would not give the bits of an uninterrupted run."""
    if newest is None:
        return ["there is no whole checkpoint"]
    reasons = _lost_metrics(folder, newest)
    if "model" not in stored and not folder.dataset.exists():
        # A run of a user's loop: its data are unknown.
        then = newest["exactness"]
        return reasons + changes(then, {**then, "torch": torch.__version__})
    settings = from_stored(stored, folder.config)
    try:
        _check_data(settings, DataFacts.read(folder.dataset))
        use_threads(settings.portable_bits)
        now = exactness_facts(pick_device(settings.device), compiled=settings.compile != "none")
        then = newest["exactness"]
        if (processes := then.get("processes", 1)) > 1 or settings.parts is not None:
            # The next command decides on the number of processes and threads.
            now["threads"] = then["threads"]
            reasons += [POWERSGD_FORGETS] if settings.compression == "powersgd" else []
        if "processes" in then:  # missing in a run in parts, whose bits do not depend on it
            now["processes"] = processes
        reasons += changes(then, now)
    except InputError as error:
        reasons.append(str(error).splitlines()[0])
    return reasons


def _check_data(settings: ResolvedSettings, facts: DataFacts) -> None:
    """Raise InputError if the data or the model's file have changed, as far as visible without code."""
    if "data" in named_code(vars(settings)):
        check_model_file(facts, settings.model)
        return
    train, val = open_data(dataclasses.replace(settings, download=False))
    check_unchanged(facts, train, val, settings=settings)
    if settings.test is not None:
        check_test(facts, settings)


def _unreadable_facts(folder: RunFolder, stored: Mapping[str, Any]) -> list[str]:
    """Why dataset.json, which predictions need, cannot be read; a script's run has none.

    InputError: config.toml has not the settings of a run.
    """
    if "model" not in stored and not folder.dataset.exists():
        return []
    from_stored(stored, folder.config)
    try:
        dataset_facts(folder.dataset)
    except ValueError as error:
        return [f"{folder.dataset.name} cannot be read: {error}"]
    return []


def _unreadable_soup(folder: RunFolder, result: Result) -> list[str]:
    """Why soup.json, which says of which runs the weights are the average, cannot be read."""
    if result.weights != "soup":
        return []
    runs = json_table(folder.soup).get("runs")
    is_whole = isinstance(runs, list) and all(
        isinstance(one, dict) and isinstance(one.get("sha256"), str) for one in runs
    )
    return [] if is_whole else [f"{folder.soup.name} does not name the runs of this average"]


def _lost_metrics(folder: RunFolder, newest: dict[str, Any]) -> list[str]:
    """What is wrong with metrics.jsonl up to the checkpoint."""
    size, crc32 = newest.get("metrics_bytes", 0), newest.get("metrics_crc32")
    name = folder.metrics.name
    if not folder.metrics.is_file():
        what = "no file" if folder.metrics.exists() else "missing"
        return [f"{name} is {what}"] if size or what == "no file" else []
    if folder.metrics.stat().st_size < size:
        return [f"{name} is shorter than at the checkpoint"]
    if crc32 is not None and crc32_of(folder.metrics, size) != crc32:
        return [f"{name} is not what it was at the checkpoint"]
    return []


def _added_metrics(folder: RunFolder, last: dict[str, Any]) -> list[str]:
    """What a finished run's metrics.jsonl has beyond its last checkpoint, which is as old as its last line.

    Only after a checkpoint at the end of an epoch; otherwise evaluations may have followed it.
    """
    size = folder.metrics.stat().st_size if folder.metrics.is_file() else 0
    more = size - last.get("metrics_bytes", size)
    if more <= 0 or last["position"] != 0:
        return []
    return [f"{folder.metrics.name} has {more} bytes that the run has not written, at its end"]
