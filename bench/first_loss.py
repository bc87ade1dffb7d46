"""What a run would say of the first loss of scripts with a planted mistake, and of healthy ones.

    python bench/first_loss.py [--record]

The scripts are those of tests/tune/learning, the newer ones in `unseen` included. Most use no Run, so each is
run until its first `Tensor.backward`, which is given to flambeau.run.loop.first_loss. Each runs in a folder
of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from learning_mistakes import SCRIPTS  # beside this script
from provenance import commit, cpu_model, record

UNTIL_FIRST_LOSS = """
import json, os, runpy, sys, torch
from flambeau.run.loop.first_loss import suspicious_lines

def backward(self, *args, **kwargs):
    print("first loss:" + json.dumps(suspicious_lines(self)), flush=True)
    os._exit(0)

torch.Tensor.backward = backward
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def lines_of(script: Path) -> list[str] | None:
    """None if the script makes no loss of its own: it hands the backward pass to a library."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", UNTIL_FIRST_LOSS, str(script)],
            cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": folder},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    _, found, rest = done.stdout.partition("first loss:")
    lines: list[str] | None = json.loads(rest.splitlines()[0]) if found else None
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    arguments = parser.parse_args()
    line: dict[str, object] = {}
    for kind in ("planted", "healthy"):
        scripts = sorted(SCRIPTS.glob(f"**/{kind}/*.py"))
        said = {path.name: lines_of(path) for path in scripts}
        line |= {
            kind: sum(lines is not None for lines in said.values()),
            f"{kind}_named": {name: lines for name, lines in said.items() if lines},
            f"{kind}_without_loss": [name for name, lines in said.items() if lines is None],
        }
    line |= {"torch": torch.__version__, "cpu": cpu_model(), "commit": commit()}
    record(line, __file__, keep=arguments.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
