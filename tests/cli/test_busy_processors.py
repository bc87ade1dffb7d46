"""Whether threads are told to sleep: only where processors are busy, and never against the user's choice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flambeau.cli.command import sleep_if_busy

BUSY = "some avg10=88.27 avg60=91.02 avg300=88.27 total=2607312432\nfull avg10=0.00 avg60=0.00\n"
FREE = BUSY.replace("88.27", "1.30")


def decided(folder: Path, load: str | None, pressure: str | None, **given: str) -> dict[str, str]:
    files = {"load": load, "pressure": pressure}
    for name, text in files.items():
        if text is not None:
            (folder / name).write_text(text, encoding="ascii")
    environment = dict(given)
    sleep_if_busy(environment, load=folder / "load", pressure=folder / "pressure")
    return environment


def loads(per_cpu: float) -> str:
    return f"{per_cpu * (os.cpu_count() or 1):.2f} 5.38 5.47 7/120 27747\n"


def test_busy(tmp_path: Path) -> None:
    assert decided(tmp_path, loads(2.0), BUSY) == {"OMP_WAIT_POLICY": "passive"}


@pytest.mark.parametrize(
    ("load", "pressure"),
    [
        (loads(0.1), BUSY),  # a moment, or few of many processors
        (loads(2.0), FREE),  # a program of this user that has just ended
        (loads(2.0), None),
        (None, BUSY),
        (loads(2.0), ""),
        ("", BUSY),
        (loads(2.0), "full avg10=99.00"),
        (loads(2.0), "some avg60"),
    ],
)
def test_free_or_unknown(tmp_path: Path, load: str | None, pressure: str | None) -> None:
    assert decided(tmp_path, load, pressure) == {}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_users_choice_stays(tmp_path: Path, name: str) -> None:
    assert decided(tmp_path, loads(2.0), BUSY, **{name: "active"}) == {name: "active"}


@pytest.mark.parametrize(
    ("call", "verb", "asked"),
    [
        ("main()", "train", True),
        ("main()", "evaluate", True),
        ("main()", "export", False),
        ("main(sys.argv[1:])", "train", False),
    ],
)
def test_a_process_that_computes_asks_before_torch_is_loaded(
    tmp_path: Path, call: str, verb: str, asked: bool
) -> None:
    """A program that calls `main` keeps its environment; torch may be loaded there already.

    It ends where it would load torch.
    """
    more = {"evaluate": ["."], "export": ["--out", "out"]}.get(verb, [])
    script = (
        "import sys\n"
        "class End:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            sys.exit(3)\n"
        "sys.meta_path.insert(0, End())\n"
        "import flambeau.cli.command as command\n"
        "from flambeau.cli.command import main\n"
        "command.sleep_if_busy = lambda environment: print('torch loaded:', 'torch' in sys.modules)\n"
        f"sys.argv = ['flambeau', '{verb}', 'no-such-folder', *{more}]\n"
        f"{call}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout == ("torch loaded: False\n" if asked else "")
