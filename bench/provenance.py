"""Lines of bench/results, and where their figures come from: the hardware, and the commit."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def device_model(device: str) -> str:
    """The name of a GPU, or `cpu_model` for 'cpu'. On a GPU it starts CUDA in this process."""
    if device == "cpu":
        return cpu_model()
    import torch

    return torch.cuda.get_device_name(device)


def commit() -> str:
    """Of the checkout that this file lies in; nothing where there is no git.

    Lines that benches have written there are no changes of the code that is measured.
    """

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            " with changes" if git("status", "--porcelain", "--", ":/", ":!results") else ""
        )
    except FileNotFoundError:
        return ""


def record(row: dict[str, Any], script: str, *, keep: bool) -> None:
    """Print a line; append it to the file in results that is named like the script if it is to be kept."""
    text = json.dumps(row)
    print(text, flush=True)
    if keep:
        path = Path(__file__).parent / "results" / f"{Path(script).stem}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
