"""Some cases of bench/faults/limits.py, and that what is bad is seen."""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from load_script import load_script

SCRIPT = Path(__file__).parents[1] / "bench" / "faults" / "limits.py"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="limits of other processes, and mounts"
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


def outcome(script: ModuleType, folder: Path, job: str, name: str) -> dict[str, Any]:
    (case,) = (case for case in script.CASES if case.name == name)
    if why := script.is_left_out(case):
        pytest.skip(why)
    whole = script.whole_run(script.Job(job), case, folder)
    found: dict[str, Any] = script.outcome(script.Job(job), case, folder / "met", whole)
    return found


@pytest.mark.parametrize(
    ("job", "name", "codes"),
    [
        ("loop", "files of a worker", [1]),
        ("command", "files of the run, with workers", [2]),
        ("command", "a disk that is full", [2]),
        ("command", "an ext4 that becomes read-only", [2]),
        ("loop", "/dev/shm of 256 KiB", [0]),
        ("command", "a clock that jumps by -1 days", [0]),
        ("loop", "cgroup of a rank", [76, -9]),
        ("loop", "processor time", [75]),
    ],
)
def test_a_limit_is_named_and_the_resume_is_exact(
    script: ModuleType, tmp_path: Path, job: str, name: str, codes: list[int]
) -> None:
    tmp_path.chmod(0o755)
    found = outcome(script, tmp_path, job, name)
    assert found["bad"] == [], found
    assert found["codes"] == codes


@pytest.mark.parametrize(
    ("job", "codes", "output", "bad"),
    [
        ("command", [2], "flambeau: too many open files; raise the limit (`ulimit -n`)", []),
        ("command", [-11], "", ["exit code -11", "not named: "]),
        ("command", [2], "Traceback (most recent call last):\nulimit -n", ["1 tracebacks"]),
        ("loop", [1], "Traceback (most recent call last):\nulimit -n", []),
        ("loop", [1], "Traceback (most recent call last):\nulimit -n\n" * 2, ["2 tracebacks"]),
        ("loop", [1], "KeyError: 3", ["not named: KeyError: 3"]),
        ("loop", [0], "finished", []),
    ],
)
def test_what_is_bad_is_seen(
    script: ModuleType, job: str, codes: list[int], output: str, bad: list[str]
) -> None:
    case = script.Case("files", "files", "ulimit -n", (0, *script.TOLD))
    assert list(script.complaints(script.Job(job), case, codes, output)) == bad
