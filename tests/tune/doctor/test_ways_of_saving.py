"""Scripts that save in many ways, watched by doctor and tune: every file of the user is as before."""

import argparse
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from load_script import load_script

FAULTS = Path(__file__).parents[3] / "bench" / "faults"
AT_ONCE = (
    "atomic,rotation,through_links,hard_links,mapped,attributes,by_full_path,home,temporary,sqlite,"
    "commands,kept_log,at_exit"
)
OVERLAY = """
mount -t tmpfs t /mnt && cd /mnt && mkdir l u w m &&
mount -t overlay o -o lowerdir=l,upperdir=u,workdir=w,userxattr m
"""


@cache
def campaign() -> Any:
    path = list(sys.path)
    sys.path.insert(0, f"{FAULTS}")
    module = load_script(FAULTS / "ways_of_saving.py")
    sys.path[:] = path
    return module


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", OVERLAY], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no mount namespace with an overlay here: {done.stderr.decode()[-100:]}")


def tried(
    names: str, place: Path, verb: str = "doctor", *, is_alone: bool = False
) -> dict[str, Any]:
    """What the campaign says of these ways, after it has seen that they change something by themselves."""
    options = argparse.Namespace(
        quick=True, verb=verb, flambeau=f"{sys.executable} -m flambeau", not_alone=not is_alone
    )
    row: dict[str, Any] = campaign().try_way(names, campaign().way_of(names), place, options)
    if "missing" in row:
        pytest.skip(f"needs {', '.join(row['missing'])}")
    return row


def test_a_script_that_saves_in_many_ways_changes_nothing(tmp_path: Path) -> None:
    row = tried(AT_ONCE, tmp_path)
    assert row["exit"] == 0, row["error"]
    assert row["changed"] == [] and row["left"] == []


def test_the_campaign_sees_what_is_changed(tmp_path: Path) -> None:
    """Of a script that runs without anything around it."""
    user = campaign().User(tmp_path / "user")
    try:
        way = campaign().way_of("rotation")
        user.run(campaign().command_of(way, "rotation", "prepare"))
        before = campaign().snapshot(user)
        assert campaign().changed(before, campaign().snapshot(user)) == []
        user.run(campaign().command_of(way, "rotation"), SAVING_STEPS="11")
        said = campaign().changed(before, campaign().snapshot(user))
        assert "lost: 'work/ck-000001.pt'" in said and "new: 'work/ck-000010.pt'" in said
    finally:
        user.close()


ALONE = (
    "data_cache",
    "git_commit",
    "kept_handle",
    "link_to_newest",
    "parents_place",
    "run_stopped",
)
"""Some of each kind; bench/faults/ways_of_saving.py tries all, which takes half an hour."""


@pytest.mark.slow
@pytest.mark.parametrize("way", ALONE)
def test_ways_that_cannot_be_tried_at_once(way: str, tmp_path: Path) -> None:
    row = tried(way, tmp_path, is_alone=True)
    assert campaign().is_right(row), row


@pytest.mark.slow
@pytest.mark.parametrize("way", ["run_stopped"])
def test_tune_changes_nothing(way: str, tmp_path: Path) -> None:
    row = tried(way, tmp_path, "tune")
    assert campaign().is_right(row), row
