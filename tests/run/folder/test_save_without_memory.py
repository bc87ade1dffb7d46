"""A checkpoint for which there is no memory or no thread is written while the training waits."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from flambeau.recipes.checkpoints.atomic_checkpoint import checkpoint_folders, verify_checkpoint
from flambeau.run.folder import checkpointer
from flambeau.run.folder.checkpointer import Checkpointer, SaveFailed, Snapshot


class PanicException(BaseException):
    """Of this name is what safetensors raises where Python has no memory for its bytes."""


def panics() -> None:
    raise PanicException("PyObject pointer is null")


def is_short() -> None:
    raise MemoryError


def is_not_told() -> None:
    raise SystemError("error return without exception set")  # as of numpy.prod


def is_told_as_something_else() -> None:
    try:
        raise MemoryError
    except MemoryError:
        # As torch.save does, whose archive ends with less in it than it was told.
        raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904


def save(root: Path, name: str) -> Checkpointer:
    saver = Checkpointer(root, keep=2)
    snapshot = Snapshot({"weight": torch.ones(2)}, None, {"step": 1}, {})
    saver.save(name, snapshot, best=None, before=lambda: None)
    return saver


def test_without_another_thread_it_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    saver = save(tmp_path, "step-00000001")
    (folder,) = checkpoint_folders(tmp_path)
    verify_checkpoint(folder)
    saver.wait()
    assert saver.last_good == "step-00000001"


@pytest.mark.parametrize("fails", [panics, is_short, is_not_told, is_told_as_something_else])
def test_it_is_written_while_the_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Any
) -> None:
    real, calls = checkpointer._files, list[str]()

    def files(snapshot: Snapshot) -> dict[str, bytes]:
        calls.append("")
        if len(calls) == 1:
            fails()
        return real(snapshot)

    monkeypatch.setattr(checkpointer, "_files", files)
    saver = save(tmp_path, "step-00000001")
    saver.wait()
    assert len(calls) == 2
    assert saver.last_good == "step-00000001"
    (folder,) = checkpoint_folders(tmp_path)
    verify_checkpoint(folder)


@pytest.mark.parametrize("fails", [panics, is_short, is_not_told, is_told_as_something_else])
def test_without_memory_then_either_it_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Any
) -> None:
    monkeypatch.setattr(checkpointer, "_files", lambda snapshot: fails())
    saver = save(tmp_path, "step-00000001")
    with pytest.raises(SaveFailed, match="there is no memory for it; the last good one is none"):
        saver.wait()
    saver.wait()  # it was told
    assert checkpoint_folders(tmp_path) == []


def test_other_failures_are_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()

    def files(snapshot: Snapshot) -> dict[str, bytes]:
        calls.append("")
        raise KeyError("weight")

    monkeypatch.setattr(checkpointer, "_files", files)
    with pytest.raises(KeyError):
        save(tmp_path, "step-00000001").wait()
    assert len(calls) == 1
