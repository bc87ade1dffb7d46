"""Asks `flambeau doctor --learning` about scripts with a planted mistake, and about healthy ones.

    python bench/learning_mistakes.py [--folder FOLDER] [--only WORD] [--jobs 2] [--record]

The scripts are those of tests/tune/learning: `planted/found.tsv` says for each which lines may be named. A
mistake is named if a finding has one of these lines; a healthy script is accused if there is a finding that
is certain or likely. The scripts were written by somebody who had not seen the checks, but for the eleven
newest healthy ones. Those of `--folder tests/tune/learning/unseen` came after the checks, by another author.
Each runs in a folder of its own; the scripts' files are not touched.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from provenance import commit, cpu_model, record  # beside this script

SCRIPTS = Path(__file__).parent.parent / "tests" / "tune" / "learning"


def findings(script: Path) -> list[dict[str, Any]] | None:
    """What doctor says of a script; None if it gives no answer."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "flambeau", "doctor", "--learning", "--seconds", "4", "--json",
            "--", "python", str(script),
        ]  # fmt: skip
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": folder}
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, check=False
        )
    if done.returncode:
        print(f"{script.name}: {done.stderr[-300:]}", file=sys.stderr)
        return None
    found: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    return found


def is_named(found: list[dict[str, Any]] | None, lines: str) -> bool:
    wanted = set(lines.split(","))
    return any(one["where"].rpartition(":")[2] in wanted for one in found or [])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=SCRIPTS, help="with planted/ and healthy/")
    parser.add_argument("--jobs", type=int, default=2, help="scripts that run at the same time")
    parser.add_argument("--only", default="", help="scripts whose name has this word")
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    arguments = parser.parse_args()
    scripts: Path = arguments.folder.resolve()
    text = (scripts / "planted" / "found.tsv").read_text(encoding="utf-8")
    rows = [
        row for row in csv.DictReader(text.splitlines(), delimiter="\t")
        if arguments.only in row["script"]
    ]  # fmt: skip
    healthy = sorted(
        path for path in (scripts / "healthy").glob("*.py") if arguments.only in path.name
    )
    began = time.perf_counter()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        of_planted = list(pool.map(findings, [scripts / "planted" / row["script"] for row in rows]))
        of_healthy = list(pool.map(findings, healthy))
    missed = [
        row["script"]
        for row, found in zip(rows, of_planted, strict=True)
        if not is_named(found, row["lines"])
    ]
    accused = {
        path.name: "no answer"
        if found is None
        else [f"{one['kind']}: {one['text']}" for one in found]
        for path, found in zip(healthy, of_healthy, strict=True)
        if found is None or any(one["sure"] != "look" for one in found)
    }
    row = {
        "scripts": scripts.name,
        "planted": len(rows), "named_by_line": len(rows) - len(missed), "missed": missed,
        "healthy": len(healthy), "accused": accused,
        "seconds": round(time.perf_counter() - began),
        "torch": torch.__version__, "cpu": cpu_model(), "commit": commit(),
    }  # fmt: skip
    record(row, __file__, keep=arguments.record)
    return int(bool(missed or accused))


if __name__ == "__main__":
    sys.exit(main())
