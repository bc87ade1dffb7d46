"""Page faults of tensors that are made and freed again and again, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flambeau.recipes.setup.freed_memory import keep_freed_memory

FAULTS = """
import json, resource, sys
import torch
from flambeau.recipes.setup.freed_memory import keep_freed_memory

def faults(num_bytes, rounds=8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        torch.empty(num_bytes, dtype=torch.uint8).fill_(1)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / rounds

torch.set_num_threads(1)
size = 48 * 2**20  # above the 32 MiB to which the library raises its threshold by itself
usual = faults(size)
taken = keep_freed_memory()
faults(size)  # gets the pages that are kept
# The system may take some back meanwhile, where memory is short.
print(json.dumps([usual, taken, min(faults(size) for _ in range(3))]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone")
def test_pages_are_gotten_once(tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    usual, taken, kept = json.loads(told.stdout)
    if not taken:
        pytest.skip("the C library is not that of GNU")
    assert usual > 48 * 2**20 / 4096 / 600  # also where pages have 2 MiB
    assert kept < usual / 20


def test_other_systems_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())  # as musl, which has no mallopt
    assert not keep_freed_memory()


@pytest.mark.skipif(sys.platform != "linux", reason="only there it is of use")
@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_not_under_a_limit_of_the_process(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import resource

    limits = dict.fromkeys((resource.RLIMIT_AS, resource.RLIMIT_DATA), resource.RLIM_INFINITY)
    limits[getattr(resource, name)] = 2**34
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    assert not keep_freed_memory()


def test_an_older_library_takes_a_smaller_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Libc:
        def mallopt(self, parameter: int, value: int) -> int:
            calls.append((parameter, value))
            return int(parameter == -1 or value <= 2**25)

    monkeypatch.setattr("ctypes.CDLL", lambda _: Libc())
    monkeypatch.setattr(sys, "platform", "linux")
    assert keep_freed_memory()
    assert calls == [(-3, 2**30), (-3, 2**25), (-1, 2**31 - 1)]
