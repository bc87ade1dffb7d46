"""The same faults in the saves of several libraries: what is left, and whether training goes on from it.

    python bench/faults/saving_peers.py [--cases N] [--seed S] [--seconds S] [--ways WAY ...] [--record]

torch.save, torch.distributed.checkpoint, Lightning, Accelerate, the HF Trainer and flambeau's `Run` train the
same small model (saving_peers_job.py), save it every third step, and continue in the way that each documents.
In a save after the first one the process is killed, before a call or after half of a write, or a write, sync,
rename, mkdir, unlink or link fails, once or from then on (failing_calls.py); or half is written, and the rest
is up to the program; or one bit of the newest checkpoint is changed after the training has been stopped.
Then the same script starts again, on a disk that works:

    goes on     from the newest checkpoint whose save had returned, or a later one, to the right weights
    older       from an older one, and says so
    in silence  from an older one or from the beginning without a word, or to other weights
    by hand     it ends with an error until the newest checkpoint is removed by hand
    lost        it ends with an error, and nothing that can be read is left
    not told    the fault was an error, the save was counted as done, and its checkpoint cannot be read

Needs the checkout and x86-64 Linux; libraries that are not installed are left out. Prints a JSON line per
library. tests/test_saving_peers.py runs some cases of flambeau and of torch.save.
"""

import argparse
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import forked_python
from failing_calls import WRITES, Call, Fault
from provenance import commit, cpu_model, record
from write_faults import Started, start

JOB = Path(__file__).with_name("saving_peers_job.py")
PACKAGES = {
    "torch.save, one file": "torch", "torch.save, a file each": "torch", "DCP": "torch",
    "Lightning": "lightning", "Accelerate": "accelerate", "HF Trainer": "transformers",
    "flambeau": "flambeau",
}  # fmt: skip
PATTERNS = {
    "DCP": "step-*", "Lightning": "*.ckpt", "Accelerate": "checkpoints/checkpoint_*",
    "HF Trainer": "checkpoint-*", "flambeau": "checkpoints/step-[0-9]*[0-9]",
}  # fmt: skip
"""The names of checkpoints below out/; others are *.pt."""
PRELOADED = {
    "Lightning": ["lightning.pytorch"],
    "Accelerate": ["accelerate"],
    "HF Trainer": ["transformers.trainer"],
    "DCP": ["torch.distributed.checkpoint.state_dict"],
}
KINDS = ("kill", "torn", "short", "ENOSPC", "EIO", "EIO of a sync", "a bit at rest")
WARNS = re.compile(
    "damaged|warn|corrupt|fall(s|ing)? back|not? (last )?checkpoint|begins anew", re.I
)
SYNCS = ("fsync", "fdatasync", "syncfs")
STOP_AT = 10
"""A training that is stopped in this step has saved three times."""


@dataclass(frozen=True)
class Run:
    """What a start has said.

    Attributes:
        resumed: the step where it went on; -1: it did not come so far.
        saved: the last step whose save has returned.
        weights: a hash of those at the end; '': it did not come so far.
    """

    started: Started
    resumed: int
    saved: int
    weights: str


def train(way: str, folder: Path, fault: Fault | None = None, stop: int = -1) -> Run:
    started = start(f"{JOB} '{way}'", folder, fault, PEERS_STOP=f"{stop}")
    found = {
        word: re.findall(rf"^{word} (\w+)$", started.said, re.M)
        for word in ("RESUMED", "SAVED", "END")
    }
    saved = [int(step) for step in found["SAVED"]]
    if way == "flambeau":  # which saves beside the training: what has its name is saved
        saved = [int(path.name[5:]) for path in checkpoints(way, folder)]
    return Run(
        started, int(found["RESUMED"][0]) if found["RESUMED"] else -1, max(saved, default=0),
        found["END"][0] if found["END"] else "",
    )  # fmt: skip


def prepared(way: str, folder: Path, stop: int = -1, fault: Fault | None = None) -> Run:
    """The first start, in a new folder."""
    for name in ("home", "tmp"):
        (folder / name).mkdir(parents=True)
    return train(way, folder, fault, stop)


def checkpoints(way: str, folder: Path) -> list[Path]:
    """The oldest first."""
    found = (folder / "out").glob(PATTERNS.get(way, "*.pt"))
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))


def flip_a_bit(path: Path, rng: random.Random) -> None:
    """Of any file of a checkpoint."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    sizes = [file.stat().st_size for file in files]
    (file,) = rng.choices(files, sizes)
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def faults_of(kind: str, calls: list[Call]) -> list[Fault]:
    """In the saves after the first."""
    later = calls[len(calls) // 3 :]
    if kind == "kill":
        return [Fault(call, kind) for call in later]
    if kind in ("torn", "short"):
        return [Fault(call, kind) for call in later if call.name in WRITES]
    if kind == "EIO of a sync":
        return [Fault(call, "EIO") for call in later if call.name in SYNCS]
    return [Fault(call, kind, lasts=lasts) for call in later for lasts in (kind == "ENOSPC",)]


def outcome(way: str, folder: Path, promised: int, right: str) -> str:
    """Of further starts, the first of which is that of the user."""
    again = train(way, folder)
    if again.started.code == 0 and again.weights:
        if again.weights != right:
            return "in silence"
        if again.resumed >= promised or again.resumed < 0:  # it had ended, and trains no more
            return "goes on"
        return "older" if WARNS.search(again.started.said) else "in silence"
    while found := checkpoints(way, folder):
        newest = found[-1]
        shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
        again = train(way, folder)
        if again.started.code == 0:
            return "by hand" if again.resumed > 0 else "lost"
    return "lost"


def judge(
    way: str, kind: str, fault: Fault | None, folder: Path, right: str, rng: random.Random
) -> str:
    """One case."""
    met = prepared(way, folder, STOP_AT if fault is None else -1, fault)
    if fault is None:
        flip_a_bit(checkpoints(way, folder)[-1], rng)
    elif not met.started.hit:
        return "not met"
    found = outcome(way, folder, met.saved, right)
    is_error = kind not in ("kill", "torn", "short", "a bit at rest")
    if is_error and met.started.code == 0 and found not in ("goes on", "older"):
        return "not told"
    return found


def campaign(
    way: str, scratch: Path, *, cases: int, seed: int, ends: float
) -> tuple[dict[str, Counter[str]], list[str], int]:
    """Outcomes by kind, each case that is not right as a line, and how often a save syncs anything."""
    reference = prepared(way, scratch / "whole")
    assert reference.started.code == 0, reference.started.said
    calls = [call for call in reference.started.calls if not call.path.startswith("home")]
    rng = random.Random(f"{seed} {way}")
    found: dict[str, Counter[str]] = {}
    wrong = []
    for kind in KINDS:
        counts = found[kind] = Counter()
        known = faults_of(kind, calls)
        chosen: list[Fault | None] = [None] * cases
        if kind != "a bit at rest":
            chosen = list(rng.sample(known, min(cases, len(known))))
        for fault in chosen:
            if time.monotonic() > ends:
                break
            result = judge(way, kind, fault, scratch / "case", reference.weights, rng)
            counts[result] += 1
            if result not in ("goes on", "older", "not met"):
                wrong.append(f"{kind}: {fault or 'newest'}: {result}")
            shutil.rmtree(scratch / "case")
    return found, wrong, sum(call.name in SYNCS for call in calls)


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20, help="of each kind, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after it")
    parser.add_argument("--ways", nargs="+", default=list(PACKAGES), choices=list(PACKAGES))
    parser.add_argument("--show", action="store_true", help="print each case that is not right")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    where: dict[str, Any] = {"processor": cpu_model(), "commit": commit()}
    for way in arguments.ways:  # before the first process is forked
        if version_of(PACKAGES[way]) is not None:
            forked_python._PRELOADED += PRELOADED.get(way, [])
    for way in arguments.ways:
        package = PACKAGES[way]
        if version_of(package) is None:
            print(f"{way}: left out, {package} is not installed", flush=True)
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="saving-peers-") as name:
            found, wrong, syncs = campaign(
                way, Path(name), cases=arguments.cases, seed=arguments.seed,
                ends=began + arguments.seconds,
            )  # fmt: skip
        if arguments.show:
            print(*wrong, sep="\n", file=sys.stderr)
        line = {
            "bench": "saving_peers", "way": way, "seed": arguments.seed, "syncs": syncs,
            "outcomes": {kind: dict(sorted(counts.items())) for kind, counts in found.items()},
            "seconds": round(time.monotonic() - began), package: version_of(package),
            "torch": version("torch"), **where,
        }  # fmt: skip
        record(line, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
