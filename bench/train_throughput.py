"""Images per second of whole training steps: `flambeau train` and `Run` against the best bare loop and peers.

    python bench/train_throughput.py [--limit SECONDS] [--rounds N] [--seconds S] [--out FILE] [--again]
        [--contenders NAME,...] [--models NAME,...] [--data KIND,...] [--modes eager,compile]
        [--photos FOLDER] [--timm-script train.py] [--device cpu]

ResNet-50 and ViT-S/16 of timm, 224 px, batches of 256, bf16 autocast, channels_last, fused SGD with momentum
or fused AdamW, one GPU. `bare` is a loop by hand with every lever: cudnn.benchmark, TF32 for the rest,
gradients set to None, no wait for the GPU. `timm` is a loop of timm's parts as its train.py has them, or for
photographs that script, if it is given. The data:

device  eight normalized batches on the GPU, over and over (`train` has no way to take them)
packed  photographs packed by `flambeau pack`, shorter side 8/7 of the image's: `train` and `Run` alone
jpeg    the same photographs as JPEG files in class folders

bench/made_photos.py makes the photographs; each is there many times, so that no epoch ends within the time
that counts, and all of them stay in the page cache. Crops are of 8 % of the area and more, and every
contender has a worker process per core.

A contender runs in a process of its own, and its steps are timed there for --seconds after a warm-up, in
windows that end without a wait (bench/throughput_meter.py). A line has the median of the windows with the
quartiles, and `images_per_s_mean`, from the first to the last step. `ratio` is to `bare` of the same model
on data on the device, of this call. `gpu_busy`, the share of the time in which the GPU computes, is NVML's
utilization, or the kernels' intervals by torch.profiler; `cores` is CPU seconds per second, of all processes;
`peak_memory` that of tensors on the GPU after the warm-up, on a CPU that of the process. `first_step_s`
includes imports and compilation, whose cache the contenders share.

Each line is written when it is known. What has a line of this commit and device in --out is not measured
again, so several short calls make one table. `--device cpu` tries all of it on small images.

Exit code: 0, also if --limit left something out; 1 a contender failed; 2 no such device; 130 interrupted.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

import provenance  # beside this script

BENCH = Path(__file__).resolve().parent
CONTENDER = BENCH / "throughput_contenders.py"
OUT = BENCH / "results" / "train_throughput.jsonl"
NEEDS = {"timm": ("timm",), "lightning": ("lightning", "timm"), "bare": ("timm",), "Run": ("timm",)}
PACKAGES = "torch", "torchvision", "timm", "lightning"
STARTUP_S = {"eager": 30.0, "compile": 120.0}
"""What a contender is expected to take besides the time that counts, before one was seen. Chosen."""
PATIENCE = 4.0
"""A contender that takes so many times what is expected is stopped. Chosen."""
NUM_CLASSES = 1000
SIZES = {
    "cuda": {"size": 224, "batch": 256, "seconds": 8.0, "warmup_steps": 20, "num_photos": 2048},
    "cpu": {"size": 32, "batch": 4, "seconds": 2.0, "warmup_steps": 4, "num_photos": 40},
}
"""Defaults: of the measurement, and of a trial."""
Lines = dict[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    contender: str
    model: str
    data: str
    mode: str


def groups() -> list[list[Case]]:
    """All cases, the most useful first; those of a group are compared with each other."""
    everyone = "bare", "Run", "timm", "lightning"
    readers = "train", "Run", "timm", "lightning"
    order = [
        ("resnet50", "device", "eager", everyone),
        ("resnet50", "packed", "eager", readers[:2]),
        ("vit_s16", "device", "eager", everyone),
        ("resnet50", "jpeg", "eager", readers),
        ("resnet50", "device", "compile", everyone),
        ("vit_s16", "device", "compile", everyone),
        ("resnet50", "packed", "compile", readers[:2]),
        ("vit_s16", "packed", "eager", readers[:2]),
        ("vit_s16", "packed", "compile", readers[:2]),
        ("vit_s16", "jpeg", "eager", readers),
    ]
    return [[Case(name, model, data, mode) for name in names] for model, data, mode, names in order]


class Photos:
    """The photographs in the two forms that are read, made when they are first needed.

    Args:
        folder: holds a folder for each choice of the other arguments.
        copies: how often each photograph is there.
    """

    def __init__(self, folder: Path, *, num: int, copies: int, size: int) -> None:
        self._num, self._copies, self._side = num, copies, round(size * 8 / 7)
        self._folder = folder / f"{num}-photos-{copies}-times-{self._side}-px"
        self.num_classes = min(NUM_CLASSES, num)
        self.has_segments = False

    def expected_s(self, data: str) -> float:
        """What making them may take; 0 where they are there. Chosen, above what it took."""
        if data == "device" or self._note(data).is_file():
            return 0.0
        core_s = 0.02 if self._note("made").is_file() else 0.1
        return 10.0 + core_s * self._num / len(os.sched_getaffinity(0))

    def path(self, data: str, *, deadline: float) -> Path:
        """What a reader is given as its data; raises TimeoutError if it cannot be made by then."""
        made = self._folder / "made"
        if not self._note("made").is_file():
            shutil.rmtree(made, ignore_errors=True)
            self._run(
                BENCH / "made_photos.py",
                made / "train",
                f"--num={self._num}",
                f"--classes={self.num_classes}",
                deadline=deadline,
            )
            for folder in sorted((made / "train").iterdir()):
                first = min(folder.iterdir())
                (made / "val" / folder.name).mkdir(parents=True)
                (made / "val" / folder.name / first.name).hardlink_to(first)
            self._note("made").touch()
        target = self._folder / data
        if not self._note(data).is_file():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            (self._repeat_files if data == "jpeg" else self._pack)(made, target, deadline)
            self._note(data).write_text("segments" if data == "packed" and has_kernel() else "")
        self.has_segments = data == "packed" and bool(self._note(data).read_text(encoding="utf-8"))
        return target if data == "jpeg" else target / "photos_train.rec"

    def _note(self, part: str) -> Path:
        """A file that is there when a part is whole."""
        return self._folder / f"{part}.done"

    def _repeat_files(self, made: Path, target: Path, deadline: float) -> None:
        for folder in sorted((made / "train").iterdir()):
            to = target / "train" / folder.name
            to.mkdir(parents=True)
            for path, copy in itertools.product(folder.iterdir(), range(self._copies)):
                (to / f"{path.stem}-{copy}.jpg").hardlink_to(path)
        shutil.copytree(made / "val", target / "val")

    def _pack(self, made: Path, target: Path, deadline: float) -> None:
        once = target / "once"
        once.mkdir()
        words = ["pack", made, once / "photos.rec", f"--resize={self._side}"]
        words += ["--segments"] if has_kernel() else []
        self._run("-m", "flambeau", *words, deadline=deadline)
        for name in ("photos.classes.txt", "photos_val.rec", "photos_val.idx"):
            (once / name).rename(target / name)
        repeat_records(once / "photos_train.rec", target / "photos_train.rec", self._copies)
        shutil.rmtree(once)

    def _run(self, *words: object, deadline: float) -> None:
        left = deadline - time.monotonic()
        with ended(subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment() | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )) as process:  # fmt: skip
            try:
                _, error = process.communicate(timeout=max(0.0, min(left, 1e6)))
            except subprocess.TimeoutExpired as late:
                raise TimeoutError("the photographs were not made in time") from late
        if process.returncode:
            raise RuntimeError(f"no photographs: {last_line(error)}")


def repeat_records(source: Path, target: Path, copies: int) -> None:
    """A RecordIO file with each record of another several times, in the order of the file."""
    data = source.read_bytes()
    lines = source.with_suffix(".idx").read_text(encoding="ascii").splitlines()
    offsets = [int(line.partition("\t")[2]) for line in lines]
    with target.open("wb") as file, target.with_suffix(".idx").open("w", encoding="ascii") as index:
        for copy in range(copies):
            file.write(data)
            for number, offset in enumerate(offsets, copy * len(offsets)):
                index.write(f"{number}\t{copy * len(data) + offset}\n")


def has_kernel() -> bool:
    sys.path.append(str(BENCH.parent / "src"))
    from flambeau.images.native import kernel

    return kernel.kernel() is not None


class Utilization:
    """Polls NVML in a thread for the share of the time in which the GPU computes."""

    def __init__(self, device: str) -> None:
        self._samples: list[tuple[float, float]] = []
        self._handle = nvml_handle() if device == "cuda" else None
        if self._handle is not None:
            threading.Thread(target=self._poll, daemon=True).start()

    @property
    def is_there(self) -> bool:
        return self._handle is not None

    def _poll(self) -> None:
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            while True:
                used = pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
                self._samples.append((time.monotonic(), used / 100))
                time.sleep(0.1)

    def between(self, start: float, end: float) -> float | None:
        """Of a time by `time.monotonic`; a sample is of up to a second before it."""
        late = start + min(1.0, (end - start) / 2)
        values = [value for at, value in self._samples if late <= at <= end]
        return round(statistics.mean(values), 3) if values else None


def nvml_handle() -> Any:
    """Of torch's current GPU; None where NVML does not say how busy it is, as for a part of one."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except (pynvml.NVMLError, AttributeError):
        return None
    return handle


@contextlib.contextmanager
def ended(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """Whatever happens, neither the process nor one of its session is left."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in filter(None, [process.stdin, process.stderr]):
            pipe.close()


def environment() -> dict[str, str]:
    path = filter(None, [str(BENCH.parent / "src"), os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def last_line(text: str) -> str:
    """The last line with words."""
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalpha, line))]
    return lines[-1][:500] if lines else "without a word"


class Failed(Exception):
    """A contender gave no figures; says why."""


class LimitReached(Exception):
    """The call's time is over."""


@dataclass
class Bench:
    """What the cases of a call share."""

    told: argparse.Namespace
    about: dict[str, Any]
    photos: Photos
    busy: Utilization
    deadline: float
    bare: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    seen: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """The longest that a contender took, by data and mode."""

    def expected_s(self, case: Case) -> float:
        own = self.seen.get((case.data, case.mode))
        if own is None:
            own = STARTUP_S[case.mode] + 1.5 * self.told.seconds
        return own + self.photos.expected_s(case.data)

    def line(self, case: Case) -> dict[str, Any]:
        """The case's figures; raises Failed or LimitReached."""
        start = time.monotonic()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
            job = self._job(case, Path(work))
            begin = time.monotonic()
            figures = self._figures(case, job)
        took = time.monotonic() - begin
        self.seen[case.data, case.mode] = max(took, self.seen.get((case.data, case.mode), 0.0))
        rates = figures["window_rates"]
        median = statistics.median(rates)
        low, _, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else 3 * [median]
        if case.contender == "bare":
            self.bare[case.model, case.mode] = median
        bare = self.bare.get((case.model, case.mode))
        by_nvml = self.busy.between(figures["begin"], figures["end"])
        by_profiler = figures.get("busy_by_profiler")
        return {
            "images_per_s": round(median, 1),
            "images_per_s_p25": round(low, 1),
            "images_per_s_p75": round(high, 1),
            "images_per_s_mean": round(figures["mean_rate"], 1),
            "windows": len(rates),
            "ratio": None if bare is None else round(median / bare, 3),
            "gpu_busy": by_profiler if by_nvml is None else by_nvml,
            "gpu_busy_by": "nvml" if by_nvml is not None else by_profiler and "profiler",
            "cores": round(figures["cores"], 2),
            "peak_memory": figures["peak_memory"],
            "steps": figures["steps"],
            "seconds": round(figures["end"] - figures["begin"], 2),
            "first_step_s": round(figures["first_step_s"], 1),
            "warmup_s": round(figures["warmup_s"], 1),
            "whole_s": round(time.monotonic() - start, 1),
            "segments": self.photos.has_segments if case.data == "packed" else None,
        }

    def _job(self, case: Case, work: Path) -> dict[str, Any]:
        """The fields of `throughput_contenders.Job`."""
        told = self.told
        path = ""
        if case.data != "device":
            try:
                path = str(self.photos.path(case.data, deadline=self.deadline))
            except TimeoutError as error:
                raise LimitReached(str(error)) from error
            except (RuntimeError, OSError, ImportError) as error:
                raise Failed(str(error)) from error
        on_device = case.data == "device"
        return {
            "contender": case.contender,
            "model": case.model,
            "data": case.data,
            "compile": case.mode == "compile",
            "device": told.device,
            "size": told.size,
            "batch": told.batch,
            "workers": told.workers,
            "num_classes": NUM_CLASSES if on_device else self.photos.num_classes,
            "path": path,
            "work": str(work),
            "out": str(work / "figures.json"),
            "seconds": told.seconds,
            # Batches that workers made beforehand are used up before the time counts.
            "warmup_steps": max(told.warmup_steps, 0 if on_device else 3 * told.workers),
            "profile": not self.busy.is_there,
            "timm_script": told.timm_script and str(told.timm_script.resolve()),
        }

    def _figures(self, case: Case, job: dict[str, Any]) -> dict[str, Any]:
        # What was seen of others may be the start of a light one.
        patience = PATIENCE * max(self.expected_s(case), STARTUP_S[case.mode])
        left = self.deadline - time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            with ended(subprocess.Popen(
                [sys.executable, str(CONTENDER), json.dumps(job)],
                cwd=job["work"],
                stdin=subprocess.PIPE,  # closes when this process ends
                stdout=subprocess.DEVNULL,
                stderr=errors,
                text=True,
                env=environment(),
                start_new_session=True,
            )) as process:  # fmt: skip
                try:
                    code = process.wait(max(0.0, min(left, patience)))
                except subprocess.TimeoutExpired:
                    code = None
            errors.seek(0)
            error = errors.read()
        out = Path(job["out"])
        if out.is_file():
            figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return figures
        if code is None and left <= patience:
            raise LimitReached("the limit came before its end")
        how = f"no end in {patience:.0f} s" if code is None else f"it ended with {code}"
        raise Failed(f"{how}: {last_line(error)}")


def identity(line: dict[str, Any]) -> tuple[Any, ...]:
    """What two lines have in common that need not both be measured."""
    names = (
        "contender", "by", "model", "data", "compile", "size", "batch", "workers", "round", "device",
        "commit",
    )  # fmt: skip
    return tuple(line.get(name) for name in names)


def missing(contender: str) -> str | None:
    """The package that a contender lacks here."""
    found = (name for name in NEEDS.get(contender, ()) if importlib.util.find_spec(name) is None)
    return next(found, None)


def measure(bench: Bench, known: Lines, out: Path | None) -> bool:
    """Measure each case that is chosen and not known; returns whether none failed."""
    told = bench.told
    shuffle = random.Random(told.seed)
    is_well = True
    for group in groups():
        chosen = [case for case in group if is_chosen(case, told)]
        for round_ in range(told.rounds):
            first = [case for case in chosen if case.contender == "bare"]
            rest = [case for case in chosen if case.contender != "bare"]
            for case in first + shuffle.sample(rest, len(rest)):
                row = named(case, bench, round_)
                package = missing(case.contender)
                if is_known(known.get(identity(row)), package):
                    continue
                left = bench.deadline - time.monotonic()
                if package is None and left < bench.expected_s(case):
                    note(f"not started, for lack of time: {text_of(case)}")
                    continue
                if package is not None:
                    row["skipped"] = f"{package} is not installed"
                else:
                    try:
                        row |= bench.line(case)
                    except LimitReached as why:
                        note(f"{text_of(case)}: {why}")
                        continue
                    except Failed as why:
                        is_well = False
                        row["failed"] = str(why)
                write(row | bench.about, out)
    return is_well


def is_known(line: dict[str, Any] | None, package: str | None) -> bool:
    """Whether a case has a line that stands; one that says what was missing does so until it is there."""
    return line is not None and ("skipped" not in line or package is not None)


def is_chosen(case: Case, told: argparse.Namespace) -> bool:
    return (
        case.contender in told.contenders
        and case.model in told.models
        and case.data in told.data
        and case.mode in told.modes
    )


def named(case: Case, bench: Bench, round_: int) -> dict[str, Any]:
    """What a line says besides its figures."""
    told = bench.told
    is_script = case.contender == "timm" and case.data != "device" and told.timm_script is not None
    return {
        "contender": case.contender,
        "by": "train.py" if is_script else None,
        "model": case.model,
        "data": case.data,
        "compile": case.mode == "compile",
        "size": told.size,
        "batch": told.batch,
        "workers": 0 if case.data == "device" else told.workers,
        "round": round_,
        "device": bench.about["device"],
        "commit": bench.about["commit"],
    }


def text_of(case: Case) -> str:
    return f"{case.contender}, {case.model}, {case.data}, {case.mode}"


def note(text: str) -> None:
    print(f"train_throughput: {text}", file=sys.stderr, flush=True)


def write(row: dict[str, Any], out: Path | None) -> None:
    text = json.dumps(row)
    print(text, flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def facts(told: argparse.Namespace) -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "versions": versions,
        "cuda": torch.version.cuda if told.device == "cuda" else None,
        "python": platform.python_version(),
        "device": provenance.device_model(told.device),
        "cpu": provenance.cpu_model(),
        "commit": told.commit or provenance.commit(),
        "command": " ".join(
            ["python bench/train_throughput.py", *(Path(word).name for word in sys.argv[1:])]
        ),
    }


def known_lines(out: Path | None) -> Lines:
    """The lines of a file by their identities; one that was cut off is no line."""
    found: Lines = {}
    if out is not None and out.is_file():
        for text in out.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                found[identity(line)] = line
    return found


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cases = [case for group in groups() for case in group]
    for name, field in (
        ("contenders", "contender"), ("models", "model"), ("data", "data"), ("modes", "mode"),
    ):  # fmt: skip
        every = list(dict.fromkeys(getattr(case, field) for case in cases))
        parser.add_argument(f"--{name}", type=words_of(every), default=every, metavar="NAME,...")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="of each contender that count")
    parser.add_argument("--warmup-steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--size", type=int, help="pixels")
    parser.add_argument("--workers", type=int, default=cores, help="that load photographs")
    parser.add_argument("--photos", type=Path, metavar="FOLDER", help="to keep them in")
    parser.add_argument("--num-photos", type=int)
    parser.add_argument("--copies", type=int, default=32, help="of each photograph")
    parser.add_argument("--timm-script", type=Path, metavar="train.py")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--out", type=Path, help="default: in bench/results, and none on a CPU, which only tries it"
    )
    parser.add_argument("--again", action="store_true", help="also what has a line in --out")
    parser.add_argument("--commit", help="where the tree is no checkout of git")
    parser.add_argument("--seed", type=int, default=0, help="of the order in a round")
    told = parser.parse_args(words)
    if told.timm_script is not None and not told.timm_script.is_file():
        parser.error(f"--timm-script {told.timm_script}: there is no such file")
    for name, value in SIZES[told.device].items():
        if getattr(told, name) is None:
            setattr(told, name, value)
    if told.out is None and told.device == "cuda":
        told.out = OUT
    return told


def words_of(every: Sequence[str]) -> Any:
    def words(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(every):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}: expected some of {every}")
        return found

    return words


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def main(words: Sequence[str]) -> int:
    start = time.monotonic()
    told = parse(words)
    if told.device == "cuda" and not torch.cuda.is_available():
        note("there is no CUDA device here; --device cpu tries it on small images")
        return 2
    signal.signal(signal.SIGTERM, _terminated)  # so that what runs is stopped
    if told.out is not None:
        told.out.parent.mkdir(parents=True, exist_ok=True)
    known = {} if told.again else known_lines(told.out)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = (told.photos or Path(place)).resolve()
        photos = Photos(folder, num=told.num_photos, copies=told.copies, size=told.size)
        busy = Utilization(told.device)
        bench = Bench(told, facts(told), photos, busy, start + told.limit)
        try:
            is_well = measure(bench, known, told.out)
        except KeyboardInterrupt:
            note("interrupted; the lines so far stand")
            return 130
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
