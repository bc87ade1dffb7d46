"""Kills trainings that stream from a store, and compares what they end with: flambeau beside the libraries.

    python bench/stream_kills.py [--images N] [--kills N] [--seed S] [--contenders NAME,...]
                                 [--python PATH] [--record]

Photographs, forms and readers are those of remote_stream.py. Everyone trains the same small model with SGD
for two epochs of two workers' random crops, and saves every third step what a loop of one's own would save:
weights, optimizer, torch's generator, and the place in the data as the library's own pages say (state_dict of
litData's, MosaicML's and torchdata's loaders; WebDataset has none: as many batches are skipped). flambeau is
`Run` with the data of `wrap`. A training is killed (SIGKILL, with its workers) at a random step and started
again; the cache is removed before every second start. Each contender is compared with itself:

- undisturbed: whether a second training that nobody killed has the weights of the first, bit for bit
- same_bits: how many of the killed trainings have them
- same_samples: how many had in each step the photographs that the first training had in it, in any order
- missing, twice: photographs of an epoch that no step of a killed training has used, or that two steps have;
  over both epochs, the largest numbers

--python: as for remote_stream.py; torchdata has to be there for HF datasets.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import remote_stream  # beside this script
from provenance import commit, cpu_model, record
from remote_stream import BATCH, BUCKET, PACKAGES, prepare, server

EPOCHS = 2
EVERY = 3  # steps between two saves
LONGEST_S = 600
CONTENDERS = ("flambeau", "litdata", "mosaicml", "webdataset", "huggingface")


# ---------------------------------------------------------------- a life


def train(name: str, at: str, folder: Path, cache: Path, workers: int) -> None:
    """Train to the end; a line of JSON for each step, and one for the weights."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.AdaptiveAvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(192, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_of(x: Any, numbers: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(x.float() / 255), numbers % 10)

    if name == "flambeau":
        _with_run(loss_of, model, optimizer, at, folder, cache, workers)
    else:
        _with_loop(name, loss_of, model, optimizer, at, folder, cache, workers)
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    _say(weights=digest.hexdigest())


def _with_run(
    loss_of: Callable[..., Any], model: Any, optimizer: Any, at: str, folder: Path, cache: Path, workers: int
) -> None:  # fmt: skip
    from flambeau import Run, wrap

    data = wrap(f"{at}/tar/photos.tar", remote_stream.transform(), batch_size=BATCH, cache=cache)
    run = Run(
        folder, model, optimizer, data.dataset, duration=f"{EPOCHS}ep", batch_size=BATCH,
        checkpoint_every=f"{EVERY}st", workers=workers, bar=False,
    )  # fmt: skip
    for epoch in run.epochs():
        for x, numbers in run.batches():
            run.step(loss_of(x, numbers))
            _say(epoch=epoch, step=run.state.step, numbers=numbers.tolist())


def _with_loop(
    name: str, loss_of: Callable[..., Any], model: Any, optimizer: Any, at: str, folder: Path, cache: Path,
    workers: int,
) -> None:  # fmt: skip
    """A loop as one writes it, with what a library gives for going on in the middle of an epoch."""
    import torch

    loader = LOADERS[name](at, cache, workers)
    saved = folder / "last.pt"
    epoch = done = step = 0
    if saved.exists():
        state = torch.load(saved)
        epoch, done, step = state["epoch"], state["done"], state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if state["loader"] is not None:
            loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["generator"])
    for now in range(epoch, EPOCHS):
        if hasattr(loader, "begin_epoch"):
            loader.begin_epoch(now)
        skips = done if now == epoch and not hasattr(loader, "state_dict") else 0
        for x, numbers in itertools.islice(_pairs(loader), skips, None):
            optimizer.zero_grad()
            loss_of(x, numbers).backward()
            optimizer.step()
            step, done = step + 1, (done if now == epoch else 0) + 1
            epoch = now
            _say(epoch=now, step=step, numbers=numbers.tolist())
            if step % EVERY == 0:
                place = loader.state_dict() if hasattr(loader, "state_dict") else None
                state = {
                    "epoch": now, "done": done, "step": step, "loader": place,
                    "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "generator": torch.get_rng_state(),
                }  # fmt: skip
                torch.save(state, saved.with_suffix(".part"))
                saved.with_suffix(".part").replace(saved)


def _pairs(loader: Any) -> Iterator[Any]:
    for batch in loader:
        yield (batch["image"], batch["number"]) if isinstance(batch, dict) else batch


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _mosaicml(at: str, cache: Path, workers: int) -> Any:
    import streaming

    data = remote_stream.mosaicml_photos(at, cache)
    return streaming.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)


def _huggingface(at: str, cache: Path, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = remote_stream.huggingface_photos(at)
    loader = StatefulDataLoader(data, BATCH, num_workers=workers)
    loader.begin_epoch = data.set_epoch
    return loader


LOADERS: dict[str, Callable[[str, Path, int], Any]] = {
    "litdata": lambda *words: remote_stream.of_litdata(*words)(),
    "mosaicml": _mosaicml,
    "webdataset": lambda *words: remote_stream.of_webdataset(*words)(),
    "huggingface": _huggingface,
}


# ---------------------------------------------------------------- the storm


class Training:
    """One training over all of its lives: the photographs of each step that counted, and the weights."""

    def __init__(self, name: str, folder: Path, url: str, args: argparse.Namespace) -> None:
        self._name, self._args = name, args
        self.steps: dict[int, tuple[int, list[int]]] = {}  # the last life that made a step counts
        self.weights = ""
        self._folder, self._cache = folder / "run", folder / "cache"
        self._folder.mkdir(parents=True)
        tars = sorted(path.name for path in (folder.parent / BUCKET / "tar").glob("*.tar"))
        self._environment = os.environ | {
            "AWS_ENDPOINT_URL": url,
            "S3_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "BENCH_TARS": json.dumps(tars),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
        }

    def live(self, *, until: int | None) -> None:
        """One life, killed after so many steps of its own; None: to the end."""
        args = self._args
        words = [args.python, __file__, "--train", self._name, "--at", f"s3://{BUCKET}"]
        words += ["--folder", str(self._folder), "--cache", str(self._cache), "--workers", "2"]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=errors, text=True, env=self._environment,
                start_new_session=True,
            ) as process,
        ):  # fmt: skip
            assert process.stdout is not None
            count = 0
            try:
                for line in process.stdout:
                    if not line.startswith("{"):
                        continue
                    facts = json.loads(line)
                    self.weights = facts.get("weights", "")
                    if "step" in facts:
                        self.steps[facts["step"]] = (facts["epoch"], sorted(facts["numbers"]))
                        count += 1
                        if count == until:
                            break
                if until is None:
                    process.wait(LONGEST_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            if until is None and not self.weights:
                errors.seek(0)
                said = [line for line in errors.read().splitlines() if "Error" in line]
                raise RuntimeError(f"{self._name}: {(said or ['nothing was said'])[-1][:300]}")

    def remove_cache(self) -> None:
        shutil.rmtree(self._cache, ignore_errors=True)


def storm(name: str, folder: Path, args: argparse.Namespace, images: int) -> dict[str, Any]:
    draw = random.Random(f"{args.seed} {name}")
    number = itertools.count()
    with server(folder, "plain") as url:

        def new() -> Training:
            return Training(name, folder / f"{name}-{next(number)}", url, args)

        first, second = new(), new()
        for one in (first, second):
            one.live(until=None)
        killed = []
        for k in range(args.kills):
            one = new()
            one.live(until=draw.randrange(EVERY + 1, max(first.steps)))
            if k % 2:
                one.remove_cache()
            one.live(until=None)
            killed.append(one)
    lost = [_lost(one.steps, images) for one in killed]
    return {
        "contender": name,
        "steps": max(first.steps),
        "undisturbed": second.weights == first.weights,
        "kills": args.kills,
        "same_bits": sum(one.weights == first.weights for one in killed),
        "same_samples": sum(one.steps == first.steps for one in killed),
        "missing": max(missing for missing, _ in lost),
        "twice": max(twice for _, twice in lost),
    }


def _lost(steps: Mapping[int, tuple[int, list[int]]], images: int) -> tuple[int, int]:
    """How many photographs of the epochs are missing, and how many come again."""
    missing = twice = 0
    for epoch in {epoch for epoch, _ in steps.values()}:
        used = [one for which, numbers in steps.values() if which == epoch for one in numbers]
        missing += images - len(set(used))
        twice += len(used) - len(set(used))
    return missing, twice


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--record", action="store_true")
    for name in ("--train", "--at", "--folder", "--cache", "--workers"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.at, Path(args.folder), Path(args.cache), int(args.workers))
        return
    versions = remote_stream.versions_of(args.python)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        facts = prepare(folder, args.images, args.python)
        where = {"cpu": cpu_model(), "commit": commit(), "seed": args.seed, **facts}
        for name in args.contenders.split(","):
            package = PACKAGES[name]
            if not versions[package]:
                print(f"{name}: {args.python} lacks {package}", file=sys.stderr)
                continue
            try:
                row = storm(name, folder, args, facts["images"])
            except RuntimeError as error:
                row = {"contender": name, "gave_up": str(error)}
            record(row | {package: versions[package]} | where, __file__, keep=args.record)


if __name__ == "__main__":
    main()
