"""Scripts by which a check of learning is judged: planted ones have one mistake each, healthy ones none."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent
PLANTED = SCRIPTS / "planted"
ROWS = list(
    csv.DictReader((PLANTED / "found.tsv").read_text(encoding="utf-8").splitlines(), delimiter="\t")
)
HEALTHY = sorted(path.name for path in (SCRIPTS / "healthy").glob("*.py"))


def test_the_table_names_each_script_and_lines_with_code():
    assert sorted(row["script"] for row in ROWS) == sorted(p.name for p in PLANTED.glob("*.py"))
    for row in ROWS:
        lines = (PLANTED / row["script"]).read_text(encoding="utf-8").splitlines()
        for number in row["lines"].split(","):
            assert lines[int(number) - 1].strip(), row


def printed_figures(script: Path, folder: Path) -> list[tuple[int, float]]:
    """Of each printed step its number and its loss, or what is printed after a loss that need not fall."""
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
    found = re.findall(r"^step (\d+) loss (?:\S+ [a-z]+ )?(\S+)$", run.stdout, re.M)
    return [(int(step), float(figure)) for step, figure in found]


@pytest.mark.parametrize("name", [row["script"] for row in ROWS])
def test_a_planted_script_runs_and_prints_losses(name, tmp_path):
    assert len(printed_figures(PLANTED / name, tmp_path)) >= 8


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_script_learns(name, tmp_path):
    printed = printed_figures(SCRIPTS / "healthy" / name, tmp_path)
    assert printed[-1][0] >= 55  # it prints every fifth step or fewer
    assert sum(figure for _, figure in printed[-3:]) / 3 < printed[0][1]
