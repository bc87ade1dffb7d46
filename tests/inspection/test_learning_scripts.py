"""Scripts with one planted mistake each: they run, and the table names lines that exist."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PLANTED = Path(__file__).parent / "learning_scripts" / "planted"
ROWS = list(
    csv.DictReader((PLANTED / "found.tsv").read_text(encoding="utf-8").splitlines(), delimiter="\t")
)


def test_the_table_names_each_script_and_lines_with_code():
    assert sorted(row["script"] for row in ROWS) == sorted(p.name for p in PLANTED.glob("*.py"))
    for row in ROWS:
        lines = (PLANTED / row["script"]).read_text().splitlines()
        for number in row["lines"].split(","):
            assert lines[int(number) - 1].strip(), row


@pytest.mark.parametrize("name", [row["script"] for row in ROWS])
def test_a_planted_script_runs_and_prints_losses(name, tmp_path):
    run = subprocess.run(
        [sys.executable, PLANTED / name],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"^step \d+ loss \S+$", run.stdout, re.M)) >= 8
