"""`flambeau env --disk`: how fast a folder is, and that nothing is left in it."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from flambeau.cli import env as disk
from refused import refused


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that are measured at once."""
    monkeypatch.setattr(disk, "_PIECE", 1 << 16)
    monkeypatch.setattr(disk, "_MAX", 1 << 20)


def test_a_disk_is_measured_and_left_as_it_was(small: None, tmp_path: Path) -> None:
    found = disk.disk_speed(tmp_path)
    assert found["folder"] == str(tmp_path)
    for name in ("write_mib_per_s", "read_mib_per_s"):
        speed = found[name]
        assert isinstance(speed, float) and speed > 0
    assert list(tmp_path.iterdir()) == []


def test_it_ends_in_time(small: None, tmp_path: Path) -> None:
    """Each look at the clock is two seconds later: two pieces of each kind, and not all."""
    ticks = iter(range(0, 1000, 2))
    found = disk.disk_speed(tmp_path, clock=lambda: float(next(ticks)))
    assert found["write_mib_per_s"] == pytest.approx(2 / 16 / 6, abs=0.1)


def test_an_interruption_leaves_no_file(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        disk.disk_speed(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_disks_that_cannot_be_measured(
    flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(flambeau("env --disk", tmp_path / "gone"), "gone: there is no such folder")

    def full(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(disk.tempfile, "TemporaryFile", full)
        refused(flambeau("env --disk", tmp_path), "permission denied; name a folder")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    refused(flambeau("env --disk", tmp_path), "1 MiB are left there")


def test_the_disk_is_in_the_report(
    small: None, flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = json.loads(flambeau("env --json --disk").out)
    assert report["disk"]["folder"] == "."
    assert re.search(r"^  write mib per s +\d", flambeau("env --disk", tmp_path).out, re.MULTILINE)
