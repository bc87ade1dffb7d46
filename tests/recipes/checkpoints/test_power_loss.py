"""Some states of bench/faults/power_loss.py, and that one that is read wrongly is seen."""

import math
import random
from pathlib import Path
from types import ModuleType

import pytest

from load_script import load_script

SCRIPT = Path(__file__).parents[3] / "bench" / "faults" / "power_loss.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


def test_no_state_is_read_wrongly(script: ModuleType) -> None:
    counts, bad = script.campaign(states=300, seed=7, ends=math.inf)
    assert bad == []
    assert counts["kept, dropped or torn"] > 150
    assert counts["misdirected"] > 50


def test_a_reader_that_believes_a_misdirected_write_is_seen(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = script.faults
    monkeypatch.setattr(faults, "is_right", lambda disk, step: False)  # as if it read other bytes
    _, bad = script.campaign(states=300, seed=7, ends=math.inf)
    assert bad


def test_a_write_that_lands_elsewhere_changes_a_file_on_the_disk(script: ModuleType) -> None:
    faults, rng = script.faults, random.Random(0)
    disk = faults.ModelDisk()
    faults.save(disk, 1)
    before = [bytes(file.synced) for file in script.files_below(disk.top)]
    while not script.misdirect(disk, rng):
        pass
    after = [bytes(file.synced) for file in script.files_below(disk.top)]
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1
    assert script.is_refused_or_right(disk)
