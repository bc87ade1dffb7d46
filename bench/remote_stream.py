"""Photographs streamed from a store into training batches: flambeau beside the libraries for it.

    python bench/remote_stream.py [--images N] [--rounds N] [--workers N] [--links NAME,...]
                                  [--contenders NAME,...] [--window N] [--python PATH] [--record]

The same made photographs lie in a store on loopback (s3_server.py) as each library wants them: tar shards
(flambeau's, with their index; WebDataset reads the same ones), litData's and MosaicML's chunks, Parquet for
HF datasets, and an object for each for torch with s3fs. Everyone decodes and makes random resized crops of
224 pixels, mirrored half of the time, with torchvision's v2 on PIL images, in batches of 64 of uint8;
flambeau is given the same transforms. A process of its own reads two epochs with an empty cache: the first
fetches, the second finds what the library keeps. `local` is flambeau reading the same tar from the disk.

Links: plain, latency (50 ms before each answer), 200MB (a second), 10MB (which the link cannot deliver as
fast as the processors decode), faults (1 % of the answers are 503 or cut). The contenders take turns in each
round. Figures: images a second; images per CPU second of the processes that read; seconds from the first call
until the first batch, imports among them; bytes of the store per byte of the photographs; peak of memory
(proportional set size of all processes at the end of an epoch); and how many images were missing or twice. A
contender that gives up says why. A row has medians over the rounds, and the lowest and highest.

--window: images among which flambeau shuffles; by default it shuffles sets as small as these as a whole,
whose first batches need nearly all of the data, while the others' buffers hold a thousand or less.
--python: of the environment with litdata, mosaicml-streaming, webdataset and datasets; those that it lacks
are left out by name.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from provenance import commit, cpu_model, record  # beside this script

SIZE, BATCH, BUCKET = 224, 64, "bench"
LINKS = {
    "plain": [],
    "latency": ["--latency-ms", "50"],
    "200MB": ["--mb-per-s", "200"],
    "10MB": ["--mb-per-s", "10"],
    "faults": ["--faults", "0.01"],
}
PACKAGES = {
    "litdata": "litdata",
    "mosaicml": "streaming",
    "webdataset": "webdataset",
    "huggingface": "datasets",
    "fsspec": "s3fs",
    "flambeau": "flambeau",
    "local": "flambeau",
}
LONGEST_S = 600
Batch = tuple[Any, Any]  # images, and the numbers of the photographs
Epochs = Callable[[], Iterable[Batch]]


def transform() -> Callable[[Any], Any]:
    """From a PIL image to (3, SIZE, SIZE) uint8."""
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
        ]
    )


class Sample:
    """Makes a sample of the bytes of a JPEG; can be sent to a worker."""

    def __init__(self) -> None:
        self._transform = transform()

    def __call__(self, data: bytes, number: int) -> Batch:
        from PIL import Image

        return self._transform(Image.open(io.BytesIO(data)).convert("RGB")), number


def of_flambeau(at: str, cache: Path, workers: int) -> Epochs:
    from flambeau import wrap

    is_address = "://" in at
    batches = wrap(
        f"{at}/tar/photos.tar" if is_address else Path(at) / "tar" / "photos.tar",
        transform(),
        batch_size=BATCH,
        workers=workers,
        shuffle_window=json.loads(os.environ["BENCH_WINDOW"]),
        **({"cache": cache} if is_address else {}),
    )
    return lambda: batches


def of_litdata(at: str, cache: Path, workers: int) -> Epochs:
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"  # it has no other way
    sample = Sample()

    class Photos(litdata.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, index: Any) -> Batch:
            row = super().__getitem__(index)
            return sample(row["image"], row["number"])

    data = Photos(
        f"{at}/litdata",
        cache_dir=str(cache),
        shuffle=True,
        storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
    )
    loader = litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)
    return lambda: loader


def mosaicml_photos(at: str, cache: Path) -> Any:
    import streaming

    sample = Sample()

    class Photos(streaming.StreamingDataset):
        def __getitem__(self, index: Any) -> Batch:
            row = super().__getitem__(index)
            return sample(row["image"], row["number"])

    return Photos(remote=f"{at}/mosaicml", local=str(cache), shuffle=True, batch_size=BATCH)


def of_mosaicml(at: str, cache: Path, workers: int) -> Epochs:
    from torch.utils.data import DataLoader

    data = mosaicml_photos(at, cache)
    loader = DataLoader(data, BATCH, num_workers=workers, persistent_workers=True)
    return lambda: loader


def of_webdataset(at: str, cache: Path, workers: int) -> Epochs:
    import webdataset
    from torch.utils.data import DataLoader

    sample = Sample()
    tars = json.loads(os.environ["BENCH_TARS"])
    web = at.replace("s3://", os.environ["AWS_ENDPOINT_URL"] + "/")
    urls = [f"pipe:curl -s -f --retry 5 {web}/tar/{name}" for name in tars]
    data = webdataset.WebDataset(
        urls, shardshuffle=len(urls), nodesplitter=webdataset.split_by_node, seed=0
    )
    data = data.shuffle(1000).map(
        lambda row: sample(row["jpg"], int(row["__key__"].split("/")[-1]))
    )
    loader = DataLoader(data, BATCH, num_workers=workers, persistent_workers=True)
    return lambda: loader


def huggingface_photos(at: str) -> Any:
    from datasets import Image, load_dataset

    sample = Sample()
    data = load_dataset(
        "parquet",
        data_files=f"{at}/parquet/*.parquet",
        split="train",
        streaming=True,
        storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
    )
    data = data.cast_column("image", Image(decode=False)).shuffle(seed=0, buffer_size=1000)

    def made(row: Any) -> dict[str, Any]:
        image, number = sample(row["image"]["bytes"], row["number"])
        return {"image": image, "number": number}

    return data.map(made).with_format("torch")


def of_huggingface(at: str, cache: Path, workers: int) -> Epochs:
    from torch.utils.data import DataLoader

    data = huggingface_photos(at)
    loader = DataLoader(data, BATCH, num_workers=workers, persistent_workers=True)

    def batches() -> Iterator[Batch]:
        for batch in loader:
            yield batch["image"], batch["number"]

    return batches


class Objects:
    """A map-style data set of one object per photograph."""

    def __init__(self, at: str) -> None:
        self._at, self._sample, self._fs = at, Sample(), None
        import s3fs

        names = s3fs.S3FileSystem().ls(f"{at}/objects", detail=False)
        self._names = sorted(names)
        s3fs.S3FileSystem.clear_instance_cache()

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Batch:
        import s3fs

        if self._fs is None:
            self._fs = s3fs.S3FileSystem(skip_instance_cache=True)
        name = self._names[index]
        return self._sample(self._fs.cat_file(name), int(Path(name).stem))


def of_fsspec(at: str, cache: Path, workers: int) -> Epochs:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        Objects(at),  # type: ignore[arg-type]
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        multiprocessing_context="spawn",  # a thread of s3fs does not survive a fork
    )
    return lambda: loader


CONTENDERS = {
    "local": of_flambeau,
    "flambeau": of_flambeau,
    "litdata": of_litdata,
    "mosaicml": of_mosaicml,
    "webdataset": of_webdataset,
    "huggingface": of_huggingface,
    "fsspec": of_fsspec,
}


def read(name: str, at: str, cache: Path, workers: int, images: int) -> None:
    """In a process of its own: two epochs, and a line of JSON after each."""
    import psutil
    import torch

    torch.set_num_threads(1)
    here = psutil.Process()

    def cpu_s() -> float:
        return sum(sum(one.cpu_times()[:4]) for one in _family(here))

    start = time.perf_counter()
    epochs = CONTENDERS[name](at, cache, workers)
    for epoch in range(2):
        begin, cpu_begin, first_s, seen = time.perf_counter(), cpu_s(), None, []
        if epoch == 0:
            begin = start
        for x, numbers in epochs():
            if first_s is None:
                first_s = time.perf_counter() - begin
            assert x.dtype == torch.uint8 and x.shape[1:] == (3, SIZE, SIZE)
            seen += numbers.tolist()
        figures = {
            "seconds": time.perf_counter() - begin,
            "cpu_s": cpu_s() - cpu_begin,
            "first_s": first_s,
            "pss_mb": sum(one.memory_full_info().pss for one in _family(here)) / 1e6,
            "missing": images - len(set(seen)),
            "twice": len(seen) - len(set(seen)),
        }
        print(json.dumps(figures), flush=True)


def _family(process: Any) -> list[Any]:
    return [process, *process.children(recursive=True)]


def prepare(folder: Path, images: int, python: str) -> dict[str, Any]:
    """The photographs in each form below `folder`/BUCKET; the sizes of the forms in bytes."""
    bucket = folder / BUCKET
    photos = folder / "photos"
    here = Path(__file__).parent
    _run(sys.executable, here / "made_photos.py", folder / "made", "--num", images, "--classes", 1)
    for number, path in enumerate(sorted((folder / "made").rglob("*.jpg"))):
        # A class for each, so that everyone's target tells which photograph it is.
        (photos / f"{number:05}").mkdir(parents=True)
        path.rename(photos / f"{number:05}" / f"{number:05}.jpg")
    (bucket / "tar").mkdir(parents=True)
    flambeau = [sys.executable, "-m", "flambeau", "pack"]
    _run(*flambeau, photos, bucket / "tar" / "photos.tar", "--shards", max(2, images // 250))
    (bucket / "objects").mkdir()
    for path in photos.rglob("*.jpg"):
        (bucket / "objects" / path.name).hardlink_to(path)
    _run(python, Path(__file__), "--write", folder)
    total = sum(path.stat().st_size for path in photos.rglob("*.jpg"))
    return {"images": images, "bytes": total}


def write(folder: Path) -> None:
    """With the libraries at hand: their forms of the photographs."""
    paths = sorted((folder / "photos").rglob("*.jpg"))
    rows = [{"image": path.read_bytes(), "number": int(path.stem)} for path in paths]
    bucket = folder / BUCKET
    with contextlib.suppress(ImportError):
        import litdata

        litdata.optimize(
            fn=dict,
            inputs=rows,
            output_dir=str(bucket / "litdata"),
            chunk_bytes="32MB",
            num_workers=1,
            start_method="fork",
        )
    with contextlib.suppress(ImportError):
        from streaming import MDSWriter

        columns = {"image": "bytes", "number": "int"}
        with MDSWriter(out=str(bucket / "mosaicml"), columns=columns, size_limit=32 << 20) as file:
            for row in rows:
                file.write(row)
    import pyarrow as pa
    import pyarrow.parquet as pq

    (bucket / "parquet").mkdir()
    each = 250
    for k in range(0, len(rows), each):
        some = rows[k : k + each]
        table = pa.table(
            {
                "image": [{"bytes": row["image"], "path": None} for row in some],
                "number": [row["number"] for row in some],
            }
        )
        pq.write_table(table, bucket / "parquet" / f"{k:06}.parquet", row_group_size=100)


def _run(*words: Any) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def server(folder: Path, link: str) -> Iterator[str]:
    script = Path(__file__).with_name("s3_server.py")
    command = [sys.executable, script, folder, *LINKS[link]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def figures_of(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/-/figures") as answer:
        figures: dict[str, float] = json.load(answer)
    return figures


def turn(
    name: str, link: str, folder: Path, facts: dict[str, Any], args: argparse.Namespace
) -> Any:
    """One contender once: the figures of its two epochs, or the last line that it said."""
    tars = sorted(path.name for path in (folder / BUCKET / "tar").glob("*.tar"))
    with (
        server(folder, link) as url,
        tempfile.TemporaryDirectory(dir=folder) as cache,
        tempfile.TemporaryFile("w+") as errors,
    ):
        environment = os.environ | {
            "AWS_ENDPOINT_URL": url,
            "S3_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "BENCH_TARS": json.dumps(tars),
            "BENCH_WINDOW": json.dumps(args.window),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": cache,
        }
        at = str(folder / BUCKET) if name == "local" else f"s3://{BUCKET}"
        words = [args.python, __file__, "--read", name, "--at", at, "--cache", f"{cache}/blocks"]
        words += ["--workers", str(args.workers), "--images", str(facts["images"])]
        figures_of(url)
        epochs = []
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith('{"seconds"'):
                        epochs.append(json.loads(line) | {"store": figures_of(url)})
                process.wait(LONGEST_S)
            finally:
                process.kill()
        if len(epochs) == 2 and process.returncode == 0:
            return epochs
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if "Error" in line] or ["nothing"]
        return f"exit {process.returncode}: {said[-1][:300]}"


def rows_of(turns: list[Any], facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each of the two epochs, or one that says why there is none."""
    gave_up = [one for one in turns if isinstance(one, str)]
    done = [one for one in turns if not isinstance(one, str)]
    if not done:
        yield {"gave_up": gave_up}
        return
    for epoch in range(2):
        figures = [one[epoch] for one in done]
        rates = [facts["images"] / one["seconds"] for one in figures]
        yield {
            "epoch": epoch,
            "images_per_s": round(statistics.median(rates), 1),
            "range": [round(min(rates), 1), round(max(rates), 1)],
            "images_per_cpu_s": _median(figures, lambda one: facts["images"] / one["cpu_s"]),
            "first_batch_s": _median(figures, lambda one: one["first_s"], 2),
            "store_bytes_per_byte": _median(
                figures, lambda one: one["store"]["bytes"] / facts["bytes"], 3
            ),
            "gets": _median(figures, lambda one: one["store"]["gets"], 0),
            "pss_mb": _median(figures, lambda one: one["pss_mb"], 0),
            "missing": max(one["missing"] for one in figures),
            "twice": max(one["twice"] for one in figures),
            **({"gave_up": gave_up} if gave_up else {}),
        }


def _median(figures: list[Any], of: Callable[[Any], float], digits: int = 1) -> float:
    return round(statistics.median(map(of, figures)), digits)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--window", type=int)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read(args.read, args.at, args.cache, args.workers, args.images)
        return
    if args.write:
        write(args.write)
        return
    versions = versions_of(args.python)
    names = [name for name in args.contenders.split(",") if versions[PACKAGES[name]]]
    for name in set(args.contenders.split(",")) - set(names):
        print(f"{name}: {args.python} lacks {PACKAGES[name]}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        facts = prepare(folder, args.images, args.python)
        where = {"cpu": cpu_model(), "commit": commit(), "workers": args.workers, **facts}
        where |= {} if args.window is None else {"window": args.window}
        for link in args.links.split(","):
            turns: dict[str, list[Any]] = {name: [] for name in names}
            for k in range(args.rounds):
                for name in names[k % len(names) :] + names[: k % len(names)]:
                    turns[name].append(turn(name, link, folder, facts, args))
            for name in names:
                for row in rows_of(turns[name], facts):
                    version = {PACKAGES[name]: versions[PACKAGES[name]]}
                    about = {"link": link, "contender": name, "rounds": args.rounds}
                    record(about | row | version | where, __file__, keep=args.record)


def versions_of(python: str) -> dict[str, str]:
    """Of the packages that an environment has; '' for those that it lacks."""
    code = (
        "import importlib.util, importlib.metadata as m, json, sys\n"
        "names = {'streaming': 'mosaicml-streaming'}\n"
        "print(json.dumps({one: m.version(names.get(one, one)) if importlib.util.find_spec(one)"
        " else '' for one in sys.argv[1:]}))"
    )
    names = sorted(set(PACKAGES.values()))
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


if __name__ == "__main__":
    main()
