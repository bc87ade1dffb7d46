"""Shards in a store against the same files on the local disk: every sample, label, name and fingerprint."""

import io
import json
import pickle
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.cli.command import main
from flambeau.data.sources import sample_blocks, shard_index
from flambeau.data.sources.open_data import open_parts, open_source, open_sources, open_unlabelled
from flambeau.data.sources.open_store import SHARDS_INDEX
from flambeau.data.sources.shard_index import read_index, write_index
from flambeau.data.sources.source import (
    ConcatSource,
    Source,
    fetch_ahead,
    fetches_ahead,
    mask_problem,
)
from flambeau.data.sources.store_shards import StoreShard
from flambeau.data.sources.targets import TargetChoice
from flambeau.data.sources.wide_source import found_format, of_kind
from flambeau.data.stores.block_cache import CacheOptions
from flambeau.data.stores.store import Missing, StoreFault
from flambeau.errors import DamagedData, InputError
from flambeau.recipes.data.recordio import IRHeader, RecordWriter, pack
from object_server import Fault, ObjectServer, serving
from same_sources import mask_png, png, same, without_index

KINDS = ("tar", "zip", "rec", "tfrecord", "parquet", "arrow")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "photos"
    for number, name in enumerate(("cat", "dog", "emu")):
        (folder / name).mkdir(parents=True)
        for image in range(11):
            (folder / name / f"{image:03}.png").write_bytes(png(100 * number + image))
    return folder


@pytest.fixture(scope="module")
def packed(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of each kind, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("packed")
    for kind in KINDS:
        (folder / kind).mkdir()
        assert main(["pack", f"{photos}", f"{folder / kind}/pets.{kind}", "--shards", "3"]) == 0
    return folder


@pytest.fixture
def server(packed: Path) -> Iterator[ObjectServer]:
    with serving(packed, lists=True) as serves:
        yield serves


@pytest.fixture
def cache(tmp_path: Path) -> CacheOptions:
    return CacheOptions(tmp_path / "cache")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_blocks, "BLOCK_BYTES", 4000)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/default_cache")


def braces(server: ObjectServer, kind: str) -> Path:
    return Path(f"{server.url}/{kind}/pets-{{00000..00002}}-of-00003.{kind}")


@pytest.mark.parametrize("has_index", [True, False], ids=["packed", "foreign"])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_are_the_same_as_on_the_disk(
    server: ObjectServer, packed: Path, cache: CacheOptions, kind: str, has_index: bool
) -> None:
    if not has_index:
        server.fault = without_index
    near = open_sources(packed / kind / f"pets.{kind}")
    far = open_sources(braces(server, kind), cache=cache)
    for one, other in zip(far, near, strict=True):
        same(one, other)
        same(pickle.loads(pickle.dumps(one)), other)
    assert far[0].describe(2) == near[0].describe(2).replace(f"{packed}", server.url)


@pytest.mark.parametrize(
    "form", ["pets.tar", "", "pets-*.tar", "pets-{00000,00001,00002}-of-00003.tar"]
)
def test_every_form_of_an_address(
    server: ObjectServer, packed: Path, cache: CacheOptions, form: str
) -> None:
    same(
        open_parts(Path(f"{server.url}/tar/{form}"), cache=cache)[0],
        open_parts(packed / "tar" / "pets.tar")[0],
    )


@pytest.mark.parametrize("there", ["pets_train.tar", "pets_train.tar" + SHARDS_INDEX])
def test_the_name_that_was_packed_leads_to_its_parts(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_bytes(b"")
    with serving(tmp_path) as server, pytest.raises(Missing) as raised:
        open_sources(Path(f"{server.url}/pets.tar"), cache=CacheOptions(tmp_path / "cache"))
    assert f"pets.tar is not there; did you mean {server.url}/pets_train.tar?" in str(raised.value)


def test_one_request_tells_of_packed_shards(server: ObjectServer, cache: CacheOptions) -> None:
    open_sources(Path(f"{server.url}/tar/pets.tar"), cache=cache)
    assert {one.name for one in server.requests} == {"tar/pets.tar" + SHARDS_INDEX}
    assert server.num("GET", "tar/pets.tar" + SHARDS_INDEX) == 1


def test_a_file_of_the_local_disk_by_its_address(packed: Path, cache: CacheOptions) -> None:
    same(
        open_parts(Path(f"file://{packed}/rec/pets.rec"), cache=cache)[0],
        open_parts(packed / "rec" / "pets.rec")[0],
    )


def test_foreign_shards_are_read_once(
    server: ObjectServer, cache: CacheOptions, packed: Path
) -> None:
    server.fault = without_index
    train, _ = open_sources(braces(server, "tar"), cache=cache)
    gets = [one for one in server.requests if one.method == "GET" and one.range]
    assert len(gets) == 3 + 1  # a request for each of the shards, one for the names of classes
    server.requests.clear()
    data = [train.read(index) for index in range(len(train))]
    assert server.requests == []  # their blocks are in the cache already
    again, _ = open_sources(braces(server, "tar"), cache=cache)
    assert [again.read(index) for index in range(len(again))] == data
    assert not [
        one for one in server.requests if one.method == "GET" and one.range and ".tar" in one.name
    ]


def test_every_byte_is_fetched_once_and_neighbours_together(
    server: ObjectServer, cache: CacheOptions, packed: Path
) -> None:
    source = open_parts(Path(f"{server.url}/tar/pets.tar"), cache=cache)[0]
    server.requests.clear()
    server.sent = 0
    for index in torch.randperm(len(source), generator=torch.Generator().manual_seed(0)).tolist():
        source.read(index)
    size = sum(len(source.read(index)) for index in range(len(source)))
    assert server.sent < 2 * size  # of these small images much is headers
    shards = [part for part in source.made_of if isinstance(part, StoreShard)]
    num_blocks = sum(len(shard.files.blocks) for shard in shards)
    assert 3 < num_blocks < len(source)
    assert len(server.requests) == num_blocks


def test_a_cache_smaller_than_the_data(server: ObjectServer, packed: Path, tmp_path: Path) -> None:
    cache = CacheOptions(tmp_path / "small", 20_000)
    near = open_sources(packed / "tar" / "pets.tar")
    far = open_sources(Path(f"{server.url}/tar/pets.tar"), cache=cache)
    for _ in range(2):
        for one, other in zip(far, near, strict=True):
            same(one, other)
    kept = [path for path in (tmp_path / "small" / "blocks").rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in kept) <= 20_000


def test_a_wiped_cache_is_filled_again(
    server: ObjectServer, cache: CacheOptions, packed: Path
) -> None:
    near = open_parts(packed / "tar" / "pets.tar")[0]
    far = open_parts(Path(f"{server.url}/tar/pets.tar"), cache=cache)[0]
    same(far, near)
    for path in cache.path.rglob("*"):
        if path.is_file():
            path.unlink()
    same(open_parts(Path(f"{server.url}/tar/pets.tar"), cache=cache)[0], near)


def test_what_comes_next_is_fetched_ahead(server: ObjectServer, cache: CacheOptions) -> None:
    train, _ = open_sources(Path(f"{server.url}/tar/pets.tar"), cache=cache)
    assert fetches_ahead(train)
    server.requests.clear()
    fetch_ahead(train, np.arange(len(train)))
    done = threading.Event()
    for _ in range(600):
        kept = [path for path in (cache.path / "blocks").rglob("*") if path.is_file()]
        shards = [part for part in train.made_of[0].made_of if isinstance(part, StoreShard)]
        if len(kept) == sum(len(shard.files.blocks) for shard in shards):
            break
        done.wait(0.05)
    num_requests = len(server.requests)
    assert num_requests > 3
    for index in range(len(train)):
        train.read(index)
    assert len(server.requests) == num_requests


def test_a_local_file_is_not_fetched_ahead(packed: Path) -> None:
    assert not fetches_ahead(open_sources(packed / "tar" / "pets.tar")[0])


# ---------------------------------------------------------------- what goes wrong


def changed(packed: Path, tmp_path: Path, change: Callable[[Path], None]) -> Path:
    """A copy of the tars, one of which is another one."""
    folder = tmp_path / "changed"
    folder.mkdir()
    for path in (packed / "tar").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    change(folder / "pets-00001-of-00003.tar")
    return folder


def flip_an_image(path: Path) -> None:
    data = path.read_bytes()
    at = data.index(b"IDAT") + 20
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def read_all(source: Source) -> None:
    for index in range(len(source)):
        source.read(index)


def test_a_shard_that_is_not_that_of_the_index(
    packed: Path, tmp_path: Path, cache: CacheOptions
) -> None:
    with serving(changed(packed, tmp_path, flip_an_image)) as serves:
        source = open_parts(Path(f"{serves.url}/pets.tar"), cache=cache)[0]
        with pytest.raises(StoreFault) as caught:
            read_all(source)
    first, second = str(caught.value).splitlines()
    assert "pets-00001-of-00003.tar" in first
    assert "its bytes are not those that" in first
    assert second.startswith("Upload the shards and their index again")


def test_a_foreign_shard_that_changes_meanwhile(
    packed: Path, tmp_path: Path, cache: CacheOptions
) -> None:
    folder = changed(packed, tmp_path, lambda path: None)
    with serving(folder) as serves:
        serves.fault = without_index
        source = open_parts(Path(f"{serves.url}/pets-{{00000..00002}}-of-00003.tar"), cache=cache)[
            0
        ]
        read_all(source)
        flip_an_image(folder / "pets-00001-of-00003.tar")
        wiped = CacheOptions(tmp_path / "other")
        far = pickle.loads(pickle.dumps(source))
        for shard in far.made_of:
            shard.files._cache = wiped
        with pytest.raises(StoreFault, match=r"pets-00001-of-00003\.tar has changed since"):
            read_all(far)
        again = open_parts(Path(f"{serves.url}/pets-{{00000..00002}}-of-00003.tar"), cache=cache)[0]
        assert again.fingerprint != source.fingerprint or again.read(15) != source.read(15)


def test_bytes_that_are_damaged_on_the_way_are_fetched_again(
    server: ObjectServer, cache: CacheOptions, packed: Path
) -> None:
    server.fault = lambda request: Fault(
        flip=request.number == 1 and request.name.endswith("00001-of-00003.tar")
    )
    near = open_parts(packed / "tar" / "pets.tar")[0]
    same(open_parts(Path(f"{server.url}/tar/pets.tar"), cache=cache)[0], near)


def test_a_shard_that_is_missing(packed: Path, tmp_path: Path, cache: CacheOptions) -> None:
    with serving(changed(packed, tmp_path, Path.unlink)) as serves:
        source = open_parts(Path(f"{serves.url}/pets.tar"), cache=cache)[0]
        with pytest.raises(Missing, match=r"pets-00001-of-00003\.tar is not there"):
            read_all(source)
        serves.fault = without_index
        with pytest.raises(Missing, match=r"pets-00001-of-00003\.tar is not there"):
            open_parts(Path(f"{serves.url}/pets-{{00000..00002}}-of-00003.tar"), cache=cache)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gone.tar", "gone.tar is not there"),
        ("notes.txt", "holds no shards|is not there|gives no list"),
        ("a.npz", "is not of a format that is read from a store"),
        ("photos.7z", "is not of a format that is read from a store"),
        ("{a.tar,b.rec}", "several formats"),
        ("p*.zip", "no shard in .* has such a name"),
        ("empty.tar", "empty.tar is empty"),
    ],
)
def test_what_is_no_shard(
    server: ObjectServer, packed: Path, cache: CacheOptions, name: str, words: str
) -> None:
    (packed / "tar" / "empty.tar").write_bytes(b"")
    (packed / "tar" / "a.npz").write_bytes(b"x")
    try:
        with pytest.raises(InputError, match=words) as caught:
            open_sources(Path(f"{server.url}/tar/{name}"), cache=cache)
        assert len(str(caught.value).splitlines()) <= 2
    finally:
        (packed / "tar" / "empty.tar").unlink()
        (packed / "tar" / "a.npz").unlink()


def test_folders_of_parts_without_shards_are_named(
    tmp_path: Path, packed: Path, cache: CacheOptions
) -> None:
    for part in ("train", "val"):
        (tmp_path / "data" / part).mkdir(parents=True)
        (tmp_path / "data" / part / "notes.txt").write_text("none")
    with pytest.raises(InputError, match=r"data holds no shards of packed images that are read"):
        open_sources(Path(f"file://{tmp_path}/data"), cache=cache)
    (tmp_path / "data/train/a.tar").write_bytes(next(packed.glob("tar/*.tar")).read_bytes())
    with pytest.raises(InputError, match=r"data/val/ holds no shards of packed images that are"):
        open_sources(Path(f"file://{tmp_path}/data"), cache=cache)


def test_complaints_about_a_shard_name_its_address(tmp_path: Path, cache: CacheOptions) -> None:
    (tmp_path / "odd.tar").write_bytes(b"no tar at all" * 100)
    with serving(tmp_path) as serves, pytest.raises(InputError) as caught:
        open_sources(Path(f"{serves.url}/odd.tar"), cache=cache)
    assert f"{serves.url}/odd.tar" in str(caught.value)
    assert str(cache.path) not in str(caught.value)
    assert list((cache.path / "tmp").iterdir()) == []


# ---------------------------------------------------------------- masks


def tar_of_masks(path: Path, numbers: Sequence[int], folders: Sequence[str] = ("",)) -> None:
    """Images with masks, one of which is damaged."""
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            folder = folders[number % len(folders)]
            mask = mask_png(number, (0, 2) if number < 5 else (0, 1, 7))
            for name, data in (
                (f"{folder}{number}.png", png(number)),
                (f"{folder}{number}.mask.png", mask if number != 4 else b"none"),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def fetched_again(source: Any, cache: CacheOptions) -> None:
    """Let shards read from another, empty cache."""
    if isinstance(source, StoreShard):
        source.files._cache = cache
        return
    for part in source.made_of:
        fetched_again(part, cache)


@pytest.mark.parametrize("folders", [[""], ["train/", "val/"]], ids=["one part", "two parts"])
def test_masks_in_a_tar(tmp_path: Path, cache: CacheOptions, folders: list[str]) -> None:
    (tmp_path / "data").mkdir()
    tar_of_masks(tmp_path / "data" / "a.tar", range(16), folders)
    (tmp_path / "data" / "a.classes.txt").write_text("0 sky\n1 sea\n2 sand\n7 boat\n")
    for choice in (TargetChoice(), TargetChoice("segmentation", ignore_index=7)):
        near = open_sources(tmp_path / "data" / "a.tar", choice=choice)
        with serving(tmp_path / "data") as serves:
            far = open_sources(Path(f"{serves.url}/a.tar"), choice=choice, cache=cache)
            for one, other in zip(far, near, strict=True):
                fetched_again(one, CacheOptions(tmp_path / "empty"))
                same(one, other)
                same(pickle.loads(pickle.dumps(one)), other)
            for one, other in zip(far, near, strict=True):
                problems = [
                    {mask_problem(part, at) for at in range(len(part))} for part in (one, other)
                ]
                words = f"{tmp_path}/data", serves.url
                assert {p and p.replace(*words) for p in problems[1]} == problems[0]


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "foreign"])
def test_masks_in_shards_of_tar(tmp_path: Path, cache: CacheOptions, is_packed: bool) -> None:
    """Whose classes are those of all shards together; image and mask come with one request."""
    data = tmp_path / "data"
    data.mkdir()
    if is_packed:
        for sub in ("images", "masks"):
            (tmp_path / "photos" / sub).mkdir(parents=True)
        for number in range(16):
            (tmp_path / "photos" / "images" / f"{number}.png").write_bytes(png(number))
            (tmp_path / "photos" / "masks" / f"{number}.png").write_bytes(mask_png(number))
        assert main(["pack", f"{tmp_path}/photos", f"{data}/a.tar", "--shards", "2"]) == 0
    else:
        tar_of_masks(data / "a-00000-of-00002.tar", range(8))
        tar_of_masks(data / "a-00001-of-00002.tar", range(8, 16))
    assert (data / f"a.tar{SHARDS_INDEX}").exists() == is_packed
    near = open_sources(data / "a.tar")
    with serving(data, lists=True) as serves:
        far = open_sources(Path(f"{serves.url}/a.tar"), cache=cache)
        fetched_again(far[0], CacheOptions(tmp_path / "empty"))
        serves.requests.clear()
        for one, other in zip(far, near, strict=True):
            same(one, other)
            assert fetches_ahead(one)
        shards = far[0].made_of[0].made_of  # type: ignore[attr-defined]
        assert len(serves.requests) == sum(len(one.images.files.blocks) for one in shards)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
@pytest.mark.parametrize("masks", [False, True])
def test_a_zip_that_others_made(
    tmp_path: Path, cache: CacheOptions, method: int, masks: bool
) -> None:
    """Whose files may be compressed one by one: what is stored of them is fetched."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "a.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        for number in range(20):
            name = f"{'train' if number % 4 else 'val'}/{'cat' if number % 3 else 'dog'}/{number}"
            archive.writestr(f"{name}.png", png(number))
            if masks:
                archive.writestr(f"{name}.mask.png", mask_png(number))
    choice = TargetChoice("segmentation" if masks else "classification")
    near = open_sources(path, choice=choice)
    with serving(tmp_path / "data") as serves:
        far = open_sources(Path(f"{serves.url}/a.zip"), choice=choice, cache=cache)
        for part in far:
            fetched_again(part, CacheOptions(tmp_path / "empty"))
        serves.requests.clear()
        for one, other in zip(far, near, strict=True):
            same(one, other)
            assert fetches_ahead(one)
        assert len(serves.requests) > 1
        damaged = bytearray(path.read_bytes())
        damaged[200:220] = bytes(20)
        path.write_bytes(damaged)
        fetched_again(far[0], CacheOptions(tmp_path / "another"))
        fetched_again(far[1], CacheOptions(tmp_path / "another"))
        with pytest.raises(StoreFault):
            for part in far:
                for index in range(len(part)):
                    part.read(index)


# ---------------------------------------------------------------- other targets, other uses


@pytest.mark.parametrize("task", ["multilabel", "regression"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_targets(
    photos: Path, tmp_path: Path, cache: CacheOptions, kind: str, task: str
) -> None:
    rows = ["path,a,b"]
    for number, path in enumerate(sorted(photos.rglob("*.png"))):
        values = (number % 2, number % 3 == 0) if task == "multilabel" else (number / 7, -number)
        rows.append(f"{path},{float(values[0])},{float(values[1])}")
    (tmp_path / "data.csv").write_text("\n".join(rows))
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / f"p.{kind}"
    command = ["pack", f"{tmp_path}/data.csv", f"{target}", "--shards", "2", "--task", task]
    assert main([*command, "--target", "a,b"]) == 0
    assert (tmp_path / "out" / f"p.{kind}{SHARDS_INDEX}").exists()
    with serving(tmp_path / "out") as serves:
        far = open_sources(Path(f"{serves.url}/p.{kind}"), cache=cache)
        for one, other in zip(far, open_sources(target), strict=True):
            same(one, other)
        heads = [one.name for one in serves.requests if one.method == "HEAD"]
        assert not [name for name in heads if name.endswith(f"-of-00002.{kind}")]


@pytest.mark.parametrize("has_index", [True, False], ids=["packed", "foreign"])
@pytest.mark.parametrize("kind", KINDS)
def test_images_of_16_bits_and_of_many_channels(
    tmp_path: Path, cache: CacheOptions, kind: str, has_index: bool
) -> None:
    tifffile = pytest.importorskip("tifffile")
    draw = np.random.default_rng(0)
    for number in range(12):
        folders = [tmp_path / name / "ab"[number % 2] for name in ("deep", "bands")]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        deep = draw.integers(0, 1 << 16, (20, 24), np.uint16)
        Image.fromarray(deep).save(folders[0] / f"{number}.{('png', 'tif')[number // 2 % 2]}")
        bands = draw.integers(0, 1 << 16, (20, 24, 5), np.uint16)
        tifffile.imwrite(
            folders[1] / f"{number}.tif", bands, photometric="minisblack", planarconfig="contig"
        )
    for name, stacked in (("deep", None), ("bands", 5)):
        out = tmp_path / f"packed_{name}"
        out.mkdir()
        assert main(["pack", f"{tmp_path / name}", f"{out}/p.{kind}", "--shards", "2"]) == 0
        near = open_sources(out / f"p.{kind}")
        with serving(out, lists=True) as serves:
            if not has_index:
                serves.fault = without_index
            far = open_sources(Path(f"{serves.url}/p.{kind}"), cache=cache)
            for one, other in zip(far, near, strict=True):
                same(one, other)
                assert found_format(one) == found_format(other) == ("uint16", stacked)
                wide = [of_kind(source, "uint16", stacked) for source in (one, other)]
                for at in range(len(other)):
                    pixels = [np.asarray(source.read(at)) for source in wide]
                    assert pixels[1].dtype == np.float32
                    assert pixels[1].max() > 255
                    np.testing.assert_array_equal(*pixels)


def test_a_training_on_images_of_16_bits_in_a_store(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for number in range(20):
        folder = tmp_path / "deep" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 1 << 16, (33, 40), np.uint16)).save(
            folder / f"{number}.png"
        )
    assert main(["pack", f"{tmp_path}/deep", f"{tmp_path}/p.tar", "--shards", "2"]) == 0
    how = ["--bits", "16", "--epochs", "1", "--image-size", "32", "--model", "small_convnet"]
    for run, data in (("near", f"{tmp_path}/p.tar"), ("far", f"file://{tmp_path}/p.tar")):
        assert main(["train", data, "--out", f"{tmp_path}/{run}", "--device", "cpu", *how]) == 0
        facts = json.loads((tmp_path / run / "dataset.json").read_text())
        assert facts["mean"][0] > 1000  # in levels of 16 bits
    weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("near", "far")]
    assert weights[0] == weights[1]


def test_parts_by_the_names_of_shards_and_by_folders(
    photos: Path, tmp_path: Path, cache: CacheOptions
) -> None:
    for part in ("train", "val"):
        (tmp_path / "split" / part).mkdir(parents=True)
        for name in ("cat", "dog", "emu"):
            (tmp_path / "split" / part / name).mkdir()
            for path in sorted((photos / name).iterdir())[:: 1 if part == "train" else 5]:
                (tmp_path / "split" / part / name / f"{part}{path.name}").write_bytes(
                    path.read_bytes()
                )
    (tmp_path / "out").mkdir()
    assert main(["pack", f"{tmp_path}/split", f"{tmp_path}/out/p.tar", "--shards", "2"]) == 0
    near = open_sources(tmp_path / "out")
    (tmp_path / "single").mkdir()
    assert main(["pack", f"{tmp_path}/split", f"{tmp_path}/single/p.tar"]) == 0
    near_single = open_sources(tmp_path / "single" / "p_train.tar")
    with serving(tmp_path, lists=True) as serves:
        by_folder = open_sources(Path(f"{serves.url}/out"), cache=cache)
        by_braces = open_sources(
            Path(f"{serves.url}/out/p_{{train,val}}-{{00000..00001}}-of-00002.tar"), cache=cache
        )
        single = open_sources(Path(f"{serves.url}/single/p_train.tar"), cache=cache)
        for far, expected in ((by_folder, near), (by_braces, near), (single, near_single)):
            for one, other in zip(far, expected, strict=True):
                same(one, other)
        classes = near[0].classes
        same(
            open_source(Path(f"{serves.url}/out"), classes, cache=cache),
            open_source(tmp_path / "out", classes),
        )


def test_to_predict_on(server: ObjectServer, packed: Path) -> None:
    (far,) = open_unlabelled([Path(f"{server.url}/tar/pets.tar")], ["cat", "dog"])
    (near,) = open_unlabelled([packed / "tar" / "pets.tar"], ["cat", "dog"])
    same(far.source, near.source)


def test_records_that_are_no_run_of_bytes(tmp_path: Path, cache: CacheOptions) -> None:
    """An image with the magic number of RecordIO in it is stored in two pieces."""
    magic = (0xCED7230A).to_bytes(4, "little")
    images = [png(1), b"\xff\xd8\xff\xe0" + magic * 3 + b"tail", png(2)]
    with RecordWriter(tmp_path / "odd.rec") as writer:
        for number, image in enumerate(images):
            writer.write(pack(IRHeader(0, number % 2, number, 0), image))
    near, _ = open_parts(tmp_path / "odd.rec")
    with serving(tmp_path) as serves:
        far, _ = open_parts(Path(f"{serves.url}/odd.rec"), cache=cache)
        same(far, near)
        assert [far.read(index) for index in range(3)] == images


# ---------------------------------------------------------------- the index


def index_of(packed: Path) -> bytes:
    return (packed / "tar" / f"pets.tar{SHARDS_INDEX}").read_bytes()


def test_the_index_comes_back_as_it_was(packed: Path) -> None:
    shards = read_index(index_of(packed), "here")
    assert [shard.name for shard in shards] == [f"pets-{n:05}-of-00003.tar" for n in range(3)]
    assert write_index(read_index(write_index(shards), "here")) == write_index(shards)
    for shard in shards:
        near, _ = open_parts(packed / "tar" / shard.name)
        tails = [*shard.parts[0].images.tails]
        assert [f"{packed / 'tar' / shard.name}{tail}" for tail in tails] == [
            near.describe(index) for index in range(len(near))
        ]
        assert tails == [shard.parts[0].images.tails[at] for at in range(len(tails))]
    # What messages name is not kept beside the names that it is made of.
    with np.load(io.BytesIO(index_of(packed))) as stored:
        assert len(stored["tails"]) == 0
        assert len(stored["names"]) > 0


def test_the_labels_of_an_index_are_not_copied(packed: Path) -> None:
    parts = [shard.parts[0] for shard in read_index(index_of(packed), "here")]
    options = CacheOptions(packed / "cache")
    whole = ConcatSource([StoreShard("s3://b/a.tar", part, options) for part in parts])
    assert whole.labels.data_ptr() == parts[0].labels.data_ptr()
    assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))
    turned = ConcatSource([StoreShard("s3://b/a.tar", part, options) for part in parts[::-1]])
    assert torch.equal(turned.labels, torch.cat([part.labels for part in parts[::-1]]))


@pytest.mark.parametrize(("offset", "value"), [(10, 93), (8, 1)], ids=["method", "lock"])
def test_an_index_that_cannot_be_unpacked_is_refused(packed: Path, offset: int, value: int) -> None:
    data = bytearray(index_of(packed))
    data[data.index(b"PK\1\2") + offset] = value
    with pytest.raises(DamagedData, match=r"^here is damaged"):
        read_index(bytes(data), "here")


def test_an_index_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, head=np.zeros(65 << 20, np.uint8))
    with pytest.raises(DamagedData, match=r"^here is damaged"):
        read_index(file.getvalue(), "here", scratch=tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_large_index_is_read_from_the_disk(
    server: ObjectServer, packed: Path, cache: CacheOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, _ = open_parts(packed / "tar" / "pets.tar")
    monkeypatch.setattr("flambeau.data.sources.unpacked_arrays.LARGE", 0)
    far, _ = open_parts(Path(f"{server.url}/tar/pets.tar"), cache=cache)
    same(far, near)
    data = index_of(packed)
    shards = read_index(data, "here", scratch=cache.path)
    assert write_index(shards) == write_index(read_index(data, "here"))
    assert [*shards[0].parts[0].names] == [*read_index(data, "here")[0].parts[0].names]
    assert not shards[0].parts[0].images.sizes.flags.owndata
    for at in range(0, len(data), len(data) // 20):
        with pytest.raises(DamagedData):
            read_index(data[:at], "here", scratch=cache.path)


@pytest.mark.parametrize("part", range(40))
def test_a_damaged_index_is_refused(packed: Path, part: int) -> None:
    data = bytearray(index_of(packed))
    at = len(data) * part // 40
    data[at] ^= 0x55
    try:
        shards = read_index(bytes(data), "here")
    except DamagedData as error:
        assert str(error).startswith("here is damaged")
    else:  # a byte that says nothing
        assert write_index(shards) == write_index(read_index(index_of(packed), "here"))
    with pytest.raises(DamagedData):
        read_index(index_of(packed)[: -1 - at], "here")


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": lambda a: a + 10**9},
        {"offsets": lambda a: -a - 1},
        {"sizes": lambda a: a - 10**6},
        {"sizes": lambda a: a[:-1]},
        {"labels": lambda a: a + 3},
        {"labels": lambda a: a.astype(np.float32)},
        {"names": lambda a: a[a != 0]},
        {"crcs": lambda a: a.astype(np.int64)},
        {"inline": lambda a: np.zeros(4, np.uint8)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_index_that_contradicts_itself_is_refused(
    packed: Path, change: dict[str, Callable[[Any], Any]]
) -> None:
    with np.load(io.BytesIO(index_of(packed))) as stored:
        arrays = {name: stored[name] for name in stored.files}
    for name, how in change.items():
        arrays[name] = how(arrays[name])
    file = io.BytesIO()
    np.savez(file, **arrays)
    with pytest.raises(DamagedData, match=r"^here is damaged"):
        read_index(file.getvalue(), "here")


@pytest.mark.parametrize("tails", [[], ["a"], ["", "#" * 5000], [1, 2], "#", None, -1, 10**9])
def test_words_of_an_index_are_bounded(packed: Path, tails: Any) -> None:
    with np.load(io.BytesIO(index_of(packed))) as stored:
        arrays = {name: stored[name] for name in stored.files}
    head = json.loads(arrays["head"].tobytes())
    head["shards"][0]["parts"][0]["tails"] = tails
    arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, **arrays)
    with pytest.raises(DamagedData):
        read_index(file.getvalue(), "here")


def test_names_of_an_index_stay_in_its_folder(packed: Path) -> None:
    with np.load(io.BytesIO(index_of(packed))) as stored:
        arrays = {name: stored[name] for name in stored.files}
    head = json.loads(arrays["head"].tobytes())
    head["shards"][0]["name"] = "../other/secret.tar"
    arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, **arrays)
    with pytest.raises(DamagedData):
        read_index(file.getvalue(), "here")


def test_an_index_of_another_version_says_so(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_index, "VERSION", 1)
    with pytest.raises(InputError, match=r"another version of flambeau\nPack the data again"):
        read_index(index_of(packed), "here")
