"""`flambeau verify` of shards in a store."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flambeau.data.stores import store as stores
from flambeau.data.stores.store import Retries
from object_server import Fault, ObjectServer, serving
from refused import refused
from same_sources import mask_png, png

KINDS = ("tar", "rec", "tfrecord", "parquet", "arrow")
SECOND = "pets-00001-of-00002"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of each kind, and of masks."""
    from flambeau.cli.command import main

    folder = tmp_path_factory.mktemp("verified")
    for number in range(18):
        for path, data in (
            (folder / "photos" / "abc"[number % 3] / f"{number:02}.png", png(number)),
            (folder / "masked" / "images" / f"{number:02}.png", png(number)),
            (folder / "masked" / "masks" / f"{number:02}.png", mask_png(number)),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for kind in KINDS:
        (folder / kind).mkdir()
        assert (
            main(["pack", f"{folder}/photos", f"{folder}/{kind}/pets.{kind}", "--shards", "2"]) == 0
        )
    for kind in ("tar", "parquet"):
        (folder / f"masks_{kind}").mkdir()
        target = f"{folder}/masks_{kind}/pets.{kind}"
        assert main(["pack", f"{folder}/masked", target, "--shards", "2"]) == 0
    return folder


@pytest.fixture
def server(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """Serves a copy."""
    monkeypatch.setattr(stores, "DEFAULT_RETRIES", Retries(0.01, 0.05, 0.5))
    monkeypatch.setattr(stores, "_processes", {})
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/cache")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(packed, tmp_path / "served")
    with serving(tmp_path / "served", lists=True) as serves:
        yield serves


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[data.rindex(b"IDAT") + 20 if at < 0 else at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", [*KINDS, "masks_tar", "masks_parquet"])
@pytest.mark.parametrize("deep", ["", "--deep"])
def test_whole_shards(flambeau: Any, server: ObjectServer, name: str, deep: str) -> None:
    kind = name.removeprefix("masks_")
    answer = flambeau("verify", f"{server.url}/{name}/pets.{kind}", deep)
    assert answer.code == 0, answer
    how = "pixels decoded" if deep else "headers read"
    assert answer.out.splitlines() == [
        f"{server.url}/{name}/pets-{shard:05}-of-00002.{kind}: 9 images, all whole "
        f"({how}, compared with what was packed)"
        for shard in range(2)
    ]


@pytest.mark.parametrize("kind", ["tar", "rec", "tfrecord", "arrow"])
def test_an_image_of_other_bytes(flambeau: Any, server: ObjectServer, kind: str) -> None:
    """Also one that was right when it was put into the cache."""
    address = f"{server.url}/{kind}/pets.{kind}"
    assert flambeau("pack", address, "copy.tar", "--no-shuffle").code == 0
    flip(server.folder / kind / f"{SECOND}.{kind}")
    answer = flambeau("verify", address)
    assert answer.code == 1, answer
    first, second, third = answer.out.splitlines()
    assert first.endswith("9 images, all whole (headers read, compared with what was packed)")
    assert second.startswith(f"{server.url}/{kind}/{SECOND}.{kind}, ")
    assert second.endswith(": its bytes are not what was packed")
    assert third.endswith(": DAMAGED in 1 place; 8 images are good")


@pytest.mark.parametrize("kind", ["parquet", "masks_parquet"])
def test_a_row_group_of_other_bytes(flambeau: Any, server: ObjectServer, kind: str) -> None:
    path = server.folder / kind / f"{SECOND}.parquet"
    flip(path, path.stat().st_size // 3)
    answer = flambeau("verify", f"{server.url}/{kind}/pets.parquet --json")
    assert answer.code == 1, answer
    first, second = map(json.loads, answer.out.splitlines())
    assert (first["good"], first["damaged"]) == (9, [])
    assert 0 < len(second["damaged"]) == 9 - second["good"]
    assert {one["what"] for one in second["damaged"]} == {"its bytes are not what was packed"}
    assert second["file"] == f"{server.url}/{kind}/{SECOND}.parquet"


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (Path.unlink, "the file: it is not there"),
    "short": (lambda path: path.write_bytes(path.read_bytes()[:-512]), "bytes, and had "),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", ["tar/pets.tar", "tar/", "tar/pets-{00000..00001}-of-00002.tar"])
def test_a_shard_that_is_missing_or_cut(
    flambeau: Any, server: ObjectServer, form: str, change: str
) -> None:
    how, words = CHANGES[change]
    how(server.folder / "tar" / f"{SECOND}.tar")
    answer = flambeau("verify", f"{server.url}/{form}")
    assert answer.code == 1, answer
    _, second, third = answer.out.splitlines()
    assert second.startswith(f"{server.url}/tar/{SECOND}.tar, the file: it ")
    assert words in second
    assert third.endswith("DAMAGED in 1 place; 0 images are good")


def test_damage_on_the_way_is_none(flambeau: Any, server: ObjectServer) -> None:
    seen = set()

    def fault(request: Any) -> Fault | None:
        if not request.range or "flambeau-shards" in request.name:
            return None
        is_first = (request.name, request.range) not in seen
        seen.add((request.name, request.range))
        return Fault(flip=is_first)

    server.fault = fault
    for kind in ("tar", "parquet"):
        answer = flambeau("verify", f"{server.url}/{kind}/pets.{kind}")
        assert answer.code == 0, answer


def test_what_cannot_be_verified(flambeau: Any, server: ObjectServer) -> None:
    (server.folder / "tar" / "pets.tar.flambeau-shards").unlink()
    address = f"{server.url}/tar/pets.tar"
    refused(
        flambeau("verify", address), "has no index, pets.tar.flambeau-shards", "Copy it to a disk"
    )
    refused(flambeau("verify", address, "--salvage b.tar"), "--salvage takes a file of a disk")
    server.fault = lambda request: Fault(status=403)
    refused(flambeau("verify", f"{server.url}/rec/pets.rec"), "access is denied")
    server.fault = lambda request: Fault(status=500) if request.name.endswith(".rec") else None
    refused(flambeau("verify", f"{server.url}/rec/pets.rec"), "however often it is asked again")
