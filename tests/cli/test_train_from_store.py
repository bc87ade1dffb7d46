"""`flambeau train` on shards in a store: the bits of the local files, through kills, faults, empty caches."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from flambeau.data.stores.store import Retries
from object_server import Fault, ObjectServer, Request, serving
from refused import refused

SHORT = "--image-size 32 --model small_convnet --batch-size 8 --epochs 3 --device cpu --seed 3"
KINDS = ("tar", "rec", "tfrecord", "parquet", "arrow")
SHARDS = "pets-{00000..00002}-of-00003"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from flambeau.cli.command import main

    folder = tmp_path_factory.mktemp("store")
    generator = np.random.default_rng(0)
    for name, low in (("cat", 0), ("dog", 60)):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(30):
            pixels = generator.integers(low, low + 190, (40, 44, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number:03}.png")
    for kind in KINDS:
        (folder / kind).mkdir()
        target = f"{folder / kind}/pets.{kind}"
        assert main(["pack", f"{folder}/photos", target, "--shards", "3"]) == 0
    return folder


@pytest.fixture
def server(packed: Path) -> Iterator[ObjectServer]:
    with serving(packed, lists=True) as serves:
        yield serves


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/default_cache")
    monkeypatch.setattr("flambeau.data.sources.sample_blocks.BLOCK_BYTES", 20_000)


def figures(run: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock says."""
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    clocks = ("seconds", "time", "per_second", "memory", "wait", "ahead", "_s")
    return [
        {name: value for name, value in line.items() if not any(word in name for word in clocks)}
        for line in lines
    ]


def same_bits(one: str, other: str) -> None:
    expected, found = (load_file(Path(run, "model.safetensors")) for run in (one, other))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    assert figures(one)[-1] == figures(other)[-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_bits_as_from_the_disk(
    flambeau: Any, server: ObjectServer, packed: Path, kind: str, workers: int
) -> None:
    more = f"--workers {workers}"
    assert flambeau("train", packed / kind / f"pets.{kind}", "--out near", SHORT, more).code == 0
    address = f"{server.url}/{kind}/pets.{kind}"
    answer = flambeau("train", address, "--out far", SHORT, more, "--cache cache")
    assert answer.code == 0, answer.err
    same_bits("near", "far")
    assert any(Path("cache/blocks").rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_masks_give_the_same_bits(flambeau: Any, tmp_path: Path, kind: str) -> None:
    generator = np.random.default_rng(0)
    for number in range(16):
        pixels = generator.integers(0, 255, (40, 44, 3), np.uint8)
        for sub, data in (("images", pixels), ("masks", pixels[:, :, 0] // 128)):
            Path("photos", sub).mkdir(parents=True, exist_ok=True)
            Image.fromarray(data).save(f"photos/{sub}/{number:02}.png")
    Path("store").mkdir()
    assert flambeau(f"pack photos store/a.{kind} --shards 2").code == 0
    how = "--image-size 32 --batch-size 4 --epochs 2 --device cpu --workers 2"
    answer = flambeau(f"train store/a.{kind} --out near", how)
    assert answer.code == 0, answer.err
    with serving(tmp_path / "store") as serves:
        answer = flambeau("train", f"{serves.url}/a.{kind}", "--out far --cache cache", how)
        assert answer.code == 0, answer.err
        same_bits("near", "far")
        address = f"{serves.url}/a.{kind}"
        outputs = [
            flambeau("evaluate", "far", data, "--all").out for data in (address, f"store/a.{kind}")
        ]
    assert outputs[0].replace(address, f"store/a.{kind}") == outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("has_index", [True, False])
def test_ranks_share_what_is_fetched(server: ObjectServer, packed: Path, has_index: bool) -> None:
    """Two processes, whose shares of each batch come from the same blocks."""
    if not has_index:
        server.fault = lambda request: (
            Fault(status=404) if request.name.endswith("flambeau-shards") else None
        )
    for run, data in (
        ("near", f"{packed}/tar/pets.tar"),
        ("far", f"{server.url}/tar/{SHARDS}.tar"),
    ):
        command = [sys.executable, "-m", "flambeau", "train", data, "--out", run, *SHORT.split()]
        done = subprocess.run(
            [*command, "--procs", "2"], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    same_bits("near", "far")
    size = sum(path.stat().st_size for path in (packed / "tar").glob("*.tar"))
    beside = sum(
        path.stat().st_size for path in (packed / "tar").iterdir() if path.suffix != ".tar"
    )
    assert server.sent <= size + 8 * beside


def test_a_run_goes_on_with_either(flambeau: Any, server: ObjectServer, packed: Path) -> None:
    local = packed / "tar" / "pets.tar"
    address = f"{server.url}/tar/pets.tar"
    assert flambeau("train", local, "--out whole", SHORT).code == 0
    short = SHORT.replace("--epochs 3", "--epochs 2")
    for run, one, other in (("a", local, address), ("b", address, local)):
        assert flambeau("train", one, f"--out {run}", short).code == 0
        assert flambeau("train", other, f"--out {run} --extend 1ep").code == 0
        assert Path(run, "result.json").exists()
        assert (
            json.loads(Path(run, "result.json").read_text())["step"]
            == json.loads(Path("whole", "result.json").read_text())["step"]
        )
    same_bits("a", "b")


def without_times(text: str) -> str:
    return re.sub(r"[\d.]+ ms", "", text)


def train_until(address: str, run: str, step: int, *more: str) -> None:
    """Train in a process of its own, which is killed after some steps."""
    command = [sys.executable, "-m", "flambeau", "train", address, "--out", run, *SHORT.split()]
    command += ["--checkpoint-every", "2st", "--log-every", "1", "--cache", "cache", *more]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 120
        while not Path(run, "checkpoints", f"step-{step:08d}").exists():
            assert job.poll() is None, job.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.005)
        job.send_signal(signal.SIGKILL)
        job.communicate()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_kills_and_a_wiped_cache_change_no_bit(
    flambeau: Any, server: ObjectServer, packed: Path, workers: str
) -> None:
    more = f"--checkpoint-every 2st --log-every 1 --workers {workers}"
    assert flambeau("train", packed / "tar" / "pets.tar", "--out near", SHORT, more).code == 0
    address = f"{server.url}/tar/pets.tar"
    train_until(address, "far", 4, "--workers", workers)
    shutil.rmtree("cache")
    train_until(address, "far", 10, "--workers", workers)
    answer = flambeau("train", address, "--out far", SHORT, more, "--cache cache")
    assert answer.code == 0, answer.err
    same_bits("near", "far")


def test_faults_change_no_bit_and_each_object_is_told_of_once(
    flambeau: Any, server: ObjectServer, packed: Path
) -> None:
    assert flambeau("train", packed / "tar" / "pets.tar", "--out near", SHORT).code == 0
    faults = [
        Fault(status=503),
        Fault(cut=100),
        Fault(short=9),
        Fault(flip=True),
        Fault(status=500),
    ]

    def fault(request: Request) -> Fault | None:
        is_data = request.method == "GET" and request.name.endswith(".tar")
        return faults[request.number % 5] if is_data and request.number % 2 else None

    server.fault = fault
    address = f"{server.url}/tar/pets.tar"
    answer = flambeau("train", address, "--out far", SHORT, "--cache cache")
    assert answer.code == 0, answer.err
    same_bits("near", "far")
    told = [line for line in answer.err.splitlines() if "it is asked for again" in line]
    assert len(told) == len({line.partition(": ")[0] for line in told}) == 3


def test_two_trainings_share_a_cache(server: ObjectServer, packed: Path, flambeau: Any) -> None:
    address = f"{server.url}/tar/pets.tar"
    command = [
        sys.executable,
        "-m",
        "flambeau",
        "train",
        address,
        *SHORT.split(),
        "--cache",
        "cache",
    ]
    jobs = [
        subprocess.Popen([*command, "--out", run], stderr=subprocess.PIPE, text=True)
        for run in ("a", "b")
    ]
    for job in jobs:
        _, said = job.communicate()
        assert job.returncode == 0, said
    same_bits("a", "b")
    size = sum(path.stat().st_size for path in (packed / "tar").glob("*.tar"))
    # Each byte once; the index is read by both.
    index = (packed / "tar" / "pets.tar.flambeau-shards").stat().st_size
    assert server.sent <= size + 2 * index


def test_nothing_of_a_cache_that_is_full_is_lost(
    flambeau: Any, server: ObjectServer, packed: Path
) -> None:
    assert flambeau("train", packed / "tar" / "pets.tar", "--out near", SHORT).code == 0
    address = f"{server.url}/tar/pets.tar"
    small = "--cache cache --cache-size 60KB"
    assert flambeau("train", address, "--out far", SHORT, small).code == 0
    same_bits("near", "far")
    kept = [path for path in Path("cache/blocks").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) <= 60_000


def test_the_config_names_the_address_and_no_secret(
    flambeau: Any, server: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    monkeypatch.setenv("NETRC", f"{tmp_path}/.netrc")
    address = f"{server.url}/tar/{SHARDS}.tar"
    assert flambeau("train", address, "--out run", SHORT).code == 0
    assert any("Authorization" in one.headers for one in server.requests)
    assert f'data = "{address}"' in Path("run/config.toml").read_text()
    for path in Path("run").rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes(), path


def test_an_address_gives_its_name_to_the_run(flambeau: Any, server: ObjectServer) -> None:
    assert flambeau("train", f"{server.url}/tar/{SHARDS}.tar", "--epochs 1 --device cpu").code == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("pets")
    assert not {*"{}*:"} & {*folder.name}


def test_other_commands_read_from_a_store(
    flambeau: Any, server: ObjectServer, packed: Path
) -> None:
    address, local = f"{server.url}/tar/pets.tar", packed / "tar" / "pets.tar"
    assert flambeau("train", address, "--out run", SHORT).code == 0
    for command in (
        "evaluate run DATA --json",
        "evaluate run DATA --all --json",
        "predict run DATA --json",
    ):
        words = command.split()
        far, near = (
            flambeau(*(f"{data}" if word == "DATA" else word for word in words))
            for data in (address, local)
        )
        assert (far.code, near.code) == (0, 0), far.err
        assert far.out.replace(server.url, f"{packed}") == near.out
    far, near = (flambeau("check", data) for data in (address, local))
    assert far.code == near.code
    assert without_times(far.out).replace(server.url, f"{packed}") == without_times(near.out)
    assert flambeau("features run", address, "far.npy").code == 0
    assert flambeau("features run", local, "near.npy").code == 0
    assert Path("far.npy").read_bytes() == Path("near.npy").read_bytes()
    assert flambeau("pack", address, "again.tar").code == 0
    assert flambeau("pack", local, "near.tar").code == 0
    assert Path("again.tar").read_bytes() == Path("near.tar").read_bytes()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("photos --cache here", ["cache = ", "is for data in a store", "leave it out"]),
        ("photos --cache-size 5GB", ["cache_size = '5GB'", "leave it out"]),
        ("s3://me:hunter2@bucket/a.tar", ["s3://bucket/a.tar: the address holds a user name"]),
        ("https://host/a.tar?sig=hunter2", ["https://host/a.tar: the address has a query"]),
        ("s3://bucket/a.tar --cache-size 5", ["cache_size must be a size such as 50GB"]),
        ("ftp://host/a.tar", ["is an address of a kind that is not read"]),
    ],
)
def test_what_cannot_be_is_refused(
    flambeau: Any, packed: Path, words: str, parts: list[str]
) -> None:
    Path("photos").symlink_to(packed / "photos")
    message = refused(flambeau("train", words, "--out run"), *parts)
    assert "hunter2" not in message
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (
            "train photos --out https://host/run",
            "'https://host/run' is no address that can be written",
        ),
        (
            "pack photos https://host/a.tar",
            "DST https://host/a.tar is an address where nothing can",
        ),
        ("pack photos s3://bucket/a.7z", "s3://bucket/a.7z: nothing can be packed into .7z"),
        ("pack photos s3://bucket/a.npz", "is no name of a file that is packed into a store: .rec"),
        (
            "pack photos s3://bucket/folder",
            "is no name of a file that is packed into a store: .rec",
        ),
        ("pack photos s3://bucket/a --list", "is an address in a store, where nothing is written"),
    ],
)
def test_what_is_for_later_is_refused(flambeau: Any, packed: Path, command: str, what: str) -> None:
    Path("photos").symlink_to(packed / "photos")
    refused(flambeau(command), what)
    assert [path.name for path in Path().iterdir()] == ["photos"]


def test_a_missing_package_names_the_command(
    flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    monkeypatch.setattr("flambeau.data.stores.store._processes", {})
    refused(
        flambeau("train", "az://box/a.tar", "--out run"),
        "az:// needs the package adlfs",
        "pip install 'flambeau[az]'",
    )


def test_a_store_that_fails_for_good_ends_the_run_and_it_goes_on_later(
    flambeau: Any, server: ObjectServer, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flambeau.data.stores.store.DEFAULT_RETRIES", Retries(total_s=0.3))
    monkeypatch.setattr("flambeau.data.stores.store._processes", {})
    more = f"{SHORT} --checkpoint-every 1st --skip-bad-images 9"
    assert flambeau("train", packed / "tar" / "pets.tar", "--out near", more).code == 0
    server.fault = lambda request: (
        Fault(status=500) if request.name.endswith("2-of-00003.tar") else None
    )
    address = f"{server.url}/tar/pets.tar"
    answer = flambeau("train", address, "--out far", more)
    assert answer.code == 2
    assert "pets-00002-of-00003.tar: the store answers with status 500" in answer.err
    assert "run the command again" in answer.err
    server.fault = lambda request: None
    assert flambeau("train", address, "--out far", more).code == 0
    same_bits("near", "far")
