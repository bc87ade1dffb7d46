"""Scripts by which a check of learning is judged: planted ones have one mistake each, healthy ones none.

Those of unseen/ were written after the checks, by somebody who had not read them.
"""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent
UNSEEN = SCRIPTS / "unseen"


def rows_of(planted: Path) -> list[dict[str, str]]:
    text = (planted / "found.tsv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines(), delimiter="\t"))


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.py"))


PLANTED = SCRIPTS / "planted"
ROWS = rows_of(PLANTED)
HEALTHY = names_of(SCRIPTS / "healthy")


@pytest.mark.parametrize("planted", [PLANTED, UNSEEN / "planted"], ids=["seen", "unseen"])
def test_the_table_names_each_script_and_lines_with_code(planted):
    rows = rows_of(planted)
    assert sorted(row["script"] for row in rows) == names_of(planted)
    for row in rows:
        lines = (planted / row["script"]).read_text(encoding="utf-8").splitlines()
        for number in row["lines"].split(","):
            assert lines[int(number) - 1].strip(), row


def printed_by(script: Path, folder: Path) -> str:
    run = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def printed_figures(script: Path, folder: Path) -> list[tuple[int, float]]:
    """Of each printed step its number and its loss, or what is printed after a loss that need not fall."""
    printed = printed_by(script, folder)
    found = re.findall(r"^step (\d+) loss (?:\S+ [a-z]+ )?(\S+)$", printed, re.M)
    return [(int(step), float(figure)) for step, figure in found]


@pytest.mark.parametrize("name", [row["script"] for row in ROWS])
def test_a_planted_script_runs_and_prints_losses(name, tmp_path):
    assert len(printed_figures(PLANTED / name, tmp_path)) >= 8


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_script_learns(name, tmp_path):
    printed = printed_figures(SCRIPTS / "healthy" / name, tmp_path)
    assert printed[-1][0] >= 55  # it prints every fifth step or fewer
    assert sum(figure for _, figure in printed[-3:]) / 3 < printed[0][1]


def printed_losses(script: Path, folder: Path) -> list[float]:
    return [
        float(one) for one in re.findall(r"^step \d+ loss (\S+)", printed_by(script, folder), re.M)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", names_of(UNSEEN / "planted"))
def test_an_unseen_planted_script_runs_and_prints_losses(name, tmp_path):
    assert len(printed_losses(UNSEEN / "planted" / name, tmp_path)) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("name", names_of(UNSEEN / "healthy"))
def test_an_unseen_healthy_script_learns(name, tmp_path):
    losses = printed_losses(UNSEEN / "healthy" / name, tmp_path)
    assert len(losses) >= 60
    assert sum(losses[-8:]) < sum(losses[:8])
