"""`flambeau pack SRC s3://bucket/NAME.tar`: whole or not at all, and the bytes of files on a disk."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flambeau.data.pack import store_output
from flambeau.data.sources.open_data import open_parts, open_sources
from flambeau.data.sources.open_store import SHARDS_INDEX
from flambeau.data.stores import store as stores
from flambeau.data.stores.store import Retries, Store, StoreFault
from plain_disks import keep_open_files, refuse_links
from refused import refused
from same_sources import mask_png, png, same

KINDS = ("tar", "zip", "rec", "tfrecord", "parquet", "arrow")
SHARDS = ["pets-00000-of-00002", "pets-00001-of-00002"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/cache")
    monkeypatch.setattr(stores, "DEFAULT_RETRIES", Retries(0.01, 0.05, 0.5))
    monkeypatch.setattr(stores, "_processes", {})
    for number in range(14):
        for path, data in (
            (Path("photos", "ab"[number % 2], f"{number:02}.png"), png(number)),
            (Path("masked", "images", f"{number:02}.png"), png(number)),
            (Path("masked", "masks", f"{number:02}.png"), mask_png(number)),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    Path("near").mkdir()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/far"


def files(folder: str) -> dict[str, bytes]:
    """All but the files of facts, in which the version of the index or the path may be."""
    return {
        f"{path.relative_to(folder)}": path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", [1, 2])
def test_the_files_are_those_of_a_disk(flambeau: Any, url: str, kind: str, shards: int) -> None:
    more = f"--shards {shards} --shuffle"
    assert flambeau(f"pack photos near/pets.{kind}", more).code == 0
    answer = flambeau(f"pack photos {url}/pets.{kind}", more)
    assert answer.code == 0, answer.err
    whole = f"{url}/pets.{kind}"
    first = (
        whole if shards == 1 else f"2 files, {url}/{SHARDS[0]}.{kind} ... {url}/{SHARDS[1]}.{kind}"
    )
    assert answer.out.splitlines() == [
        f"14 images in {first}",
        f"next: flambeau verify {whole}",
    ]
    near, far = files("near"), files("far")
    index = far.pop(f"pets.{kind}{SHARDS_INDEX}")
    assert near.pop(f"pets.{kind}{SHARDS_INDEX}", index) == index
    assert far == near
    same(open_parts(Path(whole))[0], open_parts(Path(f"near/pets.{kind}"))[0])
    assert flambeau(f"verify {whole}").code == 0
    assert list(Path("cache", "packing").iterdir()) == []
    again = flambeau(f"pack photos {url}/pets.{kind}", more)
    assert again.code == 0, again.err
    assert again.out.startswith("already packed: 14 images")


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_masks_and_parts(flambeau: Any, url: str, kind: str) -> None:
    more = "--shards 2 --train-ratio 0.6"
    assert flambeau(f"pack masked near/m.{kind}", more).code == 0
    assert flambeau(f"pack masked {url}/m.{kind}", more).code == 0
    assert files("far") == files("near")
    for one, other in zip(open_sources(Path(f"{url}/")), open_sources(Path("near")), strict=True):
        same(one, other)


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_cache_on_a_disk_without_links(
    flambeau: Any, url: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_links(monkeypatch)
    keep_open_files(monkeypatch)
    answer = flambeau(f"pack photos {url}/pets.{kind}")
    assert answer.code == 0, answer.err
    assert not any(Path("cache/packing").iterdir())
    assert flambeau(f"pack photos near/pets.{kind}").code == 0
    assert files("near").items() <= files("far").items()  # the index besides


class Killed(BaseException):
    """Ends the process, as far as this test is concerned."""


@pytest.mark.parametrize("step", range(7))
def test_an_interrupted_pack_goes_on(
    flambeau: Any, url: str, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Whatever of the uploads it is before: two shards, class names, index and manifest; and after each."""
    assert flambeau("pack photos near/pets.rec --shards 2").code == 0
    put = Store.put
    calls = []

    def dies(self: Store, path: Path, address: str) -> None:
        calls.append(address)
        if len(calls) == step + 1:
            if step % 2:  # after it was uploaded, and before that was noted
                put(self, path, address)
            raise Killed
        put(self, path, address)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "put", dies)
        with pytest.raises(Killed):
            flambeau(f"pack photos {url}/pets.rec --shards 2")
    assert len(calls) == step + 1
    there = files("far") if Path("far").exists() else {}
    near = files("near")
    assert there.items() <= near.items()  # each whole
    assert "pets.rec.pack.json" not in there
    if step < 5:
        assert f"pets.rec{SHARDS_INDEX}" not in there
    answer = flambeau(f"pack photos {url}/pets.rec --shards 2")
    assert answer.code == 0, answer.err
    assert files("far") == near


def test_one_file_at_a_time_is_on_the_disk(
    flambeau: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Store.put
    seen = []

    def looks(self: Store, path: Path, address: str) -> None:
        here = [one for one in Path("cache", "packing").rglob("*.tar") if one.is_file()]
        seen.append(len(here))
        put(self, path, address)

    monkeypatch.setattr(Store, "put", looks)
    assert flambeau(f"pack photos {url}/pets.tar --shards 4 --cache elsewhere").code == 0
    assert not seen.count(2)
    assert not Path("cache", "packing").exists()
    assert flambeau(f"pack photos {url}/b.tar --shards 4").code == 0
    assert max(seen) == 1


@pytest.mark.parametrize("name", [f"{SHARDS[1]}.tar", f"pets.tar{SHARDS_INDEX}"])
def test_what_is_there_is_not_overwritten(flambeau: Any, url: str, name: str) -> None:
    Path("far").mkdir()
    Path("far", name).write_bytes(b"precious")
    command = f"pack photos {url}/pets.tar --shards 2"
    refused(flambeau(command), f"{url}/{name} exists", "--fresh, which sets aside what is there")
    assert files("far") == {name: b"precious"}
    assert flambeau(command, "--fresh").code == 0
    assert Path("far", "pets.tar.old-1", name).read_bytes() == b"precious"
    first = files("far")
    assert flambeau(command, "--fresh").code == 0
    again = files("far")
    for path, data in first.items():
        if path.endswith((".tar", SHARDS_INDEX, ".pack.json")) and "/" not in path:
            assert again[f"pets.tar.old-2/{path}"] == data
            assert again[path] == data
    assert again[f"pets.tar.old-1/{name}"] == b"precious"


def test_other_images_or_settings_are_refused(flambeau: Any, url: str) -> None:
    command = f"pack photos {url}/pets.tar --shards 2"
    assert flambeau(command).code == 0
    refused(flambeau(command, "--seed 7"), f"{url}/pets.tar is there, made with seed 100, not 7")
    Path("far", f"{SHARDS[0]}.tar").unlink()
    refused(flambeau(command), f"{url}/{SHARDS[0]}.tar is missing", "--fresh")
    Path("far", "pets.tar.pack.json").write_bytes(b"{")
    refused(flambeau(command), f"{url}/pets.tar.pack.json is damaged")
    Path("far2").mkdir()
    Path("far2", "pets.classes.txt").write_text("x\ny\n")
    refused(flambeau(command.replace("/far/", "/far2/")), "pets.classes.txt exists and names other")


def test_a_shard_that_is_gone_before_the_end(
    flambeau: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(self: Any, files: Any, bad: Any) -> None:
        raise Killed

    command = f"pack photos {url}/pets.tar --shards 2"
    with monkeypatch.context() as patched:
        patched.setattr(store_output.StoreOutput, "publish", dies)
        with pytest.raises(Killed):
            flambeau(command)
    Path("far", f"{SHARDS[0]}.tar").unlink()
    refused(
        flambeau(command), f"{SHARDS[0]}.tar is not there any more as it was uploaded", "--fresh"
    )
    assert flambeau(command, "--fresh").code == 0
    assert flambeau(f"verify {url}/pets.tar").code == 0


def test_many_objects_are_asked_for_at_once(
    flambeau: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = Store.facts
    asked = []

    def notes(self: Store, address: str) -> Any:
        asked.append(address)
        return facts(self, address)

    monkeypatch.setattr(Store, "facts", notes)
    command = f"pack photos {url}/pets.tar --shards 7"
    assert flambeau(command).code == 0
    asked.clear()
    assert flambeau(command).code == 0
    assert asked == [f"{url}/pets.tar.pack.json"]


def test_json_names_the_addresses(flambeau: Any, url: str) -> None:
    answer = flambeau(f"pack photos {url}/pets.tar --shards 2 --json")
    assert json.loads(answer.out)["files"] == [f"{url}/{name}.tar" for name in SHARDS]


@pytest.fixture
def bucket(s3: Any) -> Iterator[str]:
    s3.create_bucket(Bucket="packs")
    yield "packs"
    for one in s3.list_objects_v2(Bucket="packs").get("Contents", []):
        s3.delete_object(Bucket="packs", Key=one["Key"])
    s3.delete_bucket(Bucket="packs")


def objects(s3: Any) -> dict[str, bytes]:
    found = s3.list_objects_v2(Bucket="packs").get("Contents", [])
    return {
        one["Key"]: s3.get_object(Bucket="packs", Key=one["Key"])["Body"].read() for one in found
    }


def test_a_bucket(flambeau: Any, s3: Any, bucket: str) -> None:
    command = "pack photos s3://packs/a/pets.tar --shards 2"
    assert flambeau("pack photos near/pets.tar --shards 2").code == 0
    assert flambeau(command).code == 0
    near = {f"a/{name}": data for name, data in files("near").items()}
    assert objects(s3) == near
    assert flambeau(command).out.startswith("already packed")
    same(open_parts(Path("s3://packs/a/pets.tar"))[0], open_parts(Path("near/pets.tar"))[0])
    assert flambeau("verify s3://packs/a/pets.tar").code == 0
    assert flambeau(command, "--fresh").code == 0
    aside = {name for name in objects(s3) if name.startswith("a/pets.tar.old-1/")}
    assert {re.sub("^a/pets.tar.old-1/", "", name) for name in aside} == {
        "pets.tar.pack.json",
        f"pets.tar{SHARDS_INDEX}",
        *(f"{name}.tar" for name in SHARDS),
    }
    assert near.items() <= objects(s3).items()


def test_a_bucket_that_is_not_there(flambeau: Any, s3: Any) -> None:
    answer = flambeau("pack photos s3://no-such-bucket/pets.tar --shards 2")
    refused(answer, "/pets-00000-of-00002.tar cannot be written: there is no such bucket")


def test_a_store_that_fails_leaves_what_was_done(
    flambeau: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Store.put

    def fails(self: Store, path: Path, address: str) -> None:
        if address.endswith(f"{SHARDS[1]}.tar"):
            raise StoreFault(f"{address}: the store answers with status 500\nTry later")
        put(self, path, address)

    command = f"pack photos {url}/pets.tar --shards 2"
    with monkeypatch.context() as patched:
        patched.setattr(Store, "put", fails)
        refused(flambeau(command), f"{SHARDS[1]}.tar: the store answers with status 500")
    assert [*files("far")] == [f"{SHARDS[0]}.tar"]
    shutil.rmtree("near")
    assert flambeau(command).code == 0
    assert flambeau(f"verify {url}/pets.tar").code == 0
