"""How many lines per second `flambeau lint` reads, beside TorchFix where that is installed, and what crashes.

    python bench/lint.py [--files 300] [--record] [FOLDER...]

Folders are those of installed packages by default: torch, torchvision, timm.
Found in each file is what the default rules find, in one process, of files that name one of the libraries;
seconds are of the processor, the best of three passes. A second pass over the standard library and all of
the folders counts files that end in anything but findings or a sentence, and fixes (also unsafe ones) whose
result does not parse or is not stable. One JSON line per contender.
"""

import argparse
import gc
import json
import random
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flambeau_lint.engine import RuleSet, choose, fix, lint, parses
from flambeau_lint.program import ROOTS
from flambeau_lint.rules.catalog import RULES
from flambeau_lint.source import Unreadable, decode
from flambeau_lint.versions import NEWEST, versions_for
from provenance import commit, cpu_model  # beside this script

PACKAGES = ("torch", "torchvision", "timm")
PASSES = 3


def folder_of(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def sources(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(folder.rglob("*.py"))


def with_libraries(paths: list[Path], count: int) -> list[Path]:
    """A sample of the files that name a library, the same each time."""
    words = [word.encode() for word in ROOTS]
    named = [path for path in paths if any(word in path.read_bytes() for word in words)]
    return sorted(random.Random(0).sample(named, min(count, len(named))))


def best_of(work: Callable[[], int]) -> tuple[float, int]:
    """Seconds of the processor, and what was found."""
    seconds = []
    found = 0
    gc.disable()  # as the command does
    for _ in range(PASSES):
        start = time.process_time()
        found = work()
        seconds.append(time.process_time() - start)
    return min(seconds), found


def ours(texts: list[bytes], rules: RuleSet) -> int:
    found = 0
    for text in texts:
        try:
            found += len(lint(text, rules))
        except Unreadable:
            continue
    return found


def torchfix(paths: list[Path]) -> dict[str, Any] | None:
    """The seconds of the processor of one pass, the start included; None where it is not installed."""
    if find_spec("torchfix") is None:
        return None
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "torchfix", "--select=ALL", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rows = [line for line in done.stdout.splitlines() if ": TOR" in line]
    return {"seconds": seconds, "found": len(rows)}


def crashes(paths: list[Path]) -> dict[str, int]:
    """What goes wrong over many files."""
    rules = RuleSet(choose(RULES, versions_for(NEWEST["torch"]), preview=True))
    counts = dict.fromkeys(("files", "lines", "unread", "crashed", "unparsed", "unstable"), 0)
    for path in paths:
        counts["files"] += 1
        try:
            data, _, _ = decode(path.read_bytes())
            counts["lines"] += data.count(b"\n")
            new, made = fix(data, rules, unsafe=True)
        except Unreadable:
            counts["unread"] += 1
        except Exception as error:
            counts["crashed"] += 1
            print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr)
        else:
            counts["unparsed"] += bool(made) and not parses(new)
            counts["unstable"] += bool(made) and fix(new, rules, unsafe=True)[0] != new
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="*", type=Path)
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument(
        "--record", action="store_true", help="append the lines to results/lint.jsonl"
    )
    arguments = parser.parse_args()
    folders = arguments.folders or [one for one in map(folder_of, PACKAGES) if one]
    every = list(sources(folders))
    paths = with_libraries(every, arguments.files)
    texts = [decode(path.read_bytes())[0] for path in paths]
    lines = sum(text.count(b"\n") for text in texts)
    rules = RuleSet(choose(RULES, versions_for(NEWEST["torch"])))
    seconds, found = best_of(lambda: ours(texts, rules))
    facts = {"files": len(paths), "lines": lines, "commit": commit(), "cpu": cpu_model()}
    rows = [
        {"contender": "flambeau", "lines_per_s": round(lines / seconds), "found": found, **facts}
    ]
    peer = torchfix(paths)
    if peer is not None:
        speed = round(lines / peer["seconds"])
        rows.append(
            {"contender": "torchfix", "lines_per_s": speed, "found": peer["found"], **facts}
        )
    standard = Path(sysconfig.get_paths()["stdlib"])
    more = [path for path in sources([standard]) if "site-packages" not in path.parts]
    rows.append({"contender": "flambeau, crashes", **crashes([*every, *more]), "commit": commit()})
    for row in rows:
        print(json.dumps(row))
        if arguments.record:
            with (Path(__file__).parent / "results" / "lint.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
