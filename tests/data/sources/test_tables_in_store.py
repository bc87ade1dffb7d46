"""Parquet and Arrow files in a store: the samples of the local files, however their rows are packed."""

import io
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from flambeau.cli.command import main
from flambeau.data.sources import sample_blocks
from flambeau.data.sources.open_data import open_parts, open_sources
from flambeau.data.sources.open_store import SHARDS_INDEX
from flambeau.data.sources.shard_index import read_index, write_index
from flambeau.data.sources.source import Source, fetch_ahead, image_blocks
from flambeau.data.sources.store_shards import StoreShard
from flambeau.data.sources.targets import TargetChoice
from flambeau.data.stores import store as stores
from flambeau.data.stores.block_cache import CacheOptions
from flambeau.data.stores.store import Retries, StoreFault
from flambeau.errors import DamagedData, InputError
from object_server import Fault, serving
from same_sources import mask_png, png, same

NAMES = ["cat", "dog", "emu"]
FEATURES = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": NAMES}}


@pytest.fixture(autouse=True)
def _places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sample_blocks, "BLOCK_BYTES", 4000)
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/default_cache")
    monkeypatch.setenv("FLAMBEAU_DATA", f"{tmp_path}/copies")
    monkeypatch.setattr(stores, "DEFAULT_RETRIES", Retries(0.01, 0.05, 1.0))
    monkeypatch.setattr(stores, "_processes", {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def cache(tmp_path: Path) -> CacheOptions:
    return CacheOptions(tmp_path / "cache")


def rows(count: int, start: int = 0) -> dict[str, Any]:
    return {
        "image": [{"bytes": png(start + at), "path": f"{start + at}.png"} for at in range(count)],
        "label": [at % 3 for at in range(count)],
    }


def of_hub(columns: dict[str, Any], **features: Any) -> Any:
    """A table as Hugging Face writes it."""
    info = json.dumps({"info": {"features": FEATURES | features}})
    return pa.table(columns).replace_schema_metadata({"huggingface": info})


def write(path: Path, table: Any, **how: Any) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=7, **how)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=7)


def shard_of(source: Source) -> StoreShard:
    while not isinstance(source, StoreShard):
        source = source.made_of[0]  # type: ignore[attr-defined]
    return source


def opened(folder: Path, name: str, cache: CacheOptions, **how: Any) -> Iterator[Any]:
    with serving(folder) as serves:
        yield serves
        assert open_parts(Path(f"{serves.url}/{name}"), cache=cache, **how)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_foreign_table_is_that_of_the_disk(
    folder: Path, cache: CacheOptions, kind: str, tmp_path: Path
) -> None:
    write(folder / f"a.{kind}", of_hub(rows(30) | {"note": ["x"] * 30}))
    near = open_sources(folder / f"a.{kind}")
    assert near[0].classes == ("cat", "dog", "emu")
    copies = sorted((tmp_path / "copies").rglob("*"))
    with serving(folder) as serves:
        far = open_sources(Path(f"{serves.url}/a.{kind}"), cache=cache)
        for one, other in zip(far, near, strict=True):
            same(one, other)
            same(pickle.loads(pickle.dumps(one)), other)
            blocks = [image_blocks(source.made_of[0]) for source in (one, other)]  # type: ignore[attr-defined]
            assert np.array_equal(*blocks)
        # All is in the cache since it was read for its index.
        assert [one.range is not None for one in serves.requests if one.method == "GET"].count(
            True
        ) <= 2
    assert sorted((tmp_path / "copies").rglob("*")) == copies
    assert list((cache.path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "how",
    [
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd"},
        {"compression": "snappy", "data_page_size": 1500, "data_page_version": "2.0"},
        {"use_dictionary": True, "dictionary_pagesize_limit": 2000},
    ],
    ids=["plain", "zstd", "small pages", "dictionary"],
)
@pytest.mark.parametrize("image", ["bytes", "struct"])
def test_however_images_are_packed(
    folder: Path, tmp_path: Path, how: dict[str, Any], image: str
) -> None:
    """Fetched again, with an empty cache, by rows of column chunks."""
    columns = rows(30)
    columns["image"][4] = columns["image"][2]  # twice the same
    if image == "bytes":
        columns["image"] = [one["bytes"] for one in columns["image"]]
    write(folder / "a.parquet", of_hub(columns), **how)
    near, _ = open_parts(folder / "a.parquet")
    with serving(folder) as serves:
        far, _ = open_parts(Path(f"{serves.url}/a.parquet"), cache=CacheOptions(tmp_path / "one"))
        shard_of(far).files._cache = CacheOptions(tmp_path / "two")
        same(far, near)


def test_a_row_group_is_fetched_once(folder: Path, tmp_path: Path, cache: CacheOptions) -> None:
    write(folder / "a.parquet", of_hub(rows(35)))
    with serving(folder) as serves:
        far, _ = open_parts(Path(f"{serves.url}/a.parquet"), cache=cache)
        files = shard_of(far).files
        files._cache = CacheOptions(tmp_path / "two")
        serves.requests.clear()
        serves.sent = 0
        order = torch.randperm(35, generator=torch.Generator().manual_seed(0)).tolist()
        size = sum(len(far.read(index)) for index in order)
        assert len(files.blocks) > 5
        assert len(serves.requests) == 5 + 1  # the row groups, and the metadata
        assert size < serves.sent <= (folder / "a.parquet").stat().st_size


def test_row_groups_are_fetched_ahead(folder: Path, tmp_path: Path, cache: CacheOptions) -> None:
    write(folder / "a.parquet", of_hub(rows(35)))
    with serving(folder) as serves:
        far, _ = open_parts(Path(f"{serves.url}/a.parquet"), cache=cache)
        files = shard_of(far).files
        files._cache = CacheOptions(tmp_path / "two")
        serves.requests.clear()
        fetch_ahead(far, np.arange(35))
        data = [far.read(index) for index in range(35)]
        assert len(serves.requests) <= 2 * (
            5 + 1
        )  # the metadata may be asked for by several at once
        assert data == [png(index) for index in range(35)]


def test_a_cache_smaller_than_a_row_group(folder: Path, tmp_path: Path) -> None:
    write(folder / "a.parquet", of_hub(rows(30)))
    near, _ = open_parts(folder / "a.parquet")
    cache = CacheOptions(tmp_path / "small", 6000)
    with serving(folder) as serves:
        same(open_parts(Path(f"{serves.url}/a.parquet"), cache=cache)[0], near)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_shards_of_the_hub(folder: Path, cache: CacheOptions, kind: str) -> None:
    """data/train-00000-of-00002.parquet and so on, under the folder of the repository."""
    (folder / "data").mkdir()
    for part, count in (("train", 12), ("validation", 5)):
        for shard in range(2):
            path = folder / "data" / f"{part}-{shard:05}-of-00002.{kind}"
            write(path, of_hub(rows(count, 100 * shard)))
    (folder / "README.md").write_text("# A data set")
    (folder / "data" / "notes.csv").write_text("a,b\n")
    near = open_sources(folder / "data")
    with serving(folder, lists=True) as serves:
        far = open_sources(Path(f"{serves.url}/"), cache=cache)
        for one, other in zip(far, near, strict=True):
            same(one, other)


CHOICES: dict[str, tuple[dict[str, Any], TargetChoice]] = {
    "several labels": ({"label": [[at % 3, 0][: at % 3] for at in range(24)]}, TargetChoice()),
    "numbers": (
        {"label": [at / 3 for at in range(24)]},
        TargetChoice("regression", ("label",)),
    ),
    "a group": ({"patient": [f"p{at // 3}" for at in range(24)]}, TargetChoice(group="patient")),
    "parts": (
        {"part": ["train", "val"] * 12, "patient": ["x", "y"] * 12},
        TargetChoice(split="part", group="patient"),
    ),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("what", CHOICES)
def test_what_columns_say(folder: Path, cache: CacheOptions, kind: str, what: str) -> None:
    more, choice = CHOICES[what]
    for shard in range(2):
        columns = rows(24, 50 * shard) | more
        write(folder / f"a-{shard:05}-of-00002.{kind}", pa.table(columns))
    near = open_sources(folder / f"a.{kind}", choice=choice)
    with serving(folder, lists=True) as serves:
        for name in (f"a.{kind}", f"a-{{00000..00001}}-of-00002.{kind}"):
            far = open_sources(Path(f"{serves.url}/{name}"), choice=choice, cache=cache)
            for one, other in zip(far, near, strict=True):
                same(one, other)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "foreign"])
def test_masks(folder: Path, tmp_path: Path, kind: str, is_packed: bool) -> None:
    """Of classes that are found in all shards together; one is damaged, one of another size."""
    masks = [mask_png(at, (0, 1, 7) if at < 9 else (0, 3)) for at in range(18)]
    if not is_packed:
        masks[3] = mask_png(3, width=9)
        masks[4] = b"no image"
    if is_packed:
        for at in range(18):
            for sub, data in (("images", png(at)), ("masks", masks[at])):
                (tmp_path / "photos" / sub).mkdir(parents=True, exist_ok=True)
                (tmp_path / "photos" / sub / f"{at:02}.png").write_bytes(data)
        assert main(["pack", f"{tmp_path}/photos", f"{folder}/a.{kind}", "--shards", "2"]) == 0
        assert (folder / f"a.{kind}{SHARDS_INDEX}").exists()
    else:
        for shard in range(2):
            some = range(9 * shard, 9 * shard + 9)
            columns = {
                "image": [{"bytes": png(at), "path": f"{at}.png"} for at in some],
                "mask": [{"bytes": masks[at], "path": None} for at in some],
            }
            write(folder / f"a-{shard:05}-of-00002.{kind}", pa.table(columns))
    near = open_sources(folder / f"a.{kind}")
    with serving(folder, lists=True) as serves:
        far = open_sources(Path(f"{serves.url}/a.{kind}"), cache=CacheOptions(tmp_path / "one"))
        for one, other in zip(far, near, strict=True):
            shard_of(one).files._cache = CacheOptions(tmp_path / "two")
            same(one, other)
            same(pickle.loads(pickle.dumps(one)), other)


# ---------------------------------------------------------------- what goes wrong


def flip(path: Path, what: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(what) + 20] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: flip(path, b"IDAT"),
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: write(path, of_hub(rows(30, 500))),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ],
    ids=["an image", "cut short", "another one", "zeros"],
)
def test_an_object_that_changes(
    folder: Path, tmp_path: Path, cache: CacheOptions, change: Callable[[Path], None]
) -> None:
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    write(folder / "a.parquet", of_hub(rows(30)), **plain)
    with serving(folder) as serves:
        far, _ = open_parts(Path(f"{serves.url}/a.parquet"), cache=cache)
        shard_of(far).files._cache = CacheOptions(tmp_path / "two")
        change(folder / "a.parquet")
        with pytest.raises(StoreFault, match=r"a\.parquet has changed since it was first read"):
            [far.read(index) for index in range(30)]


def test_bytes_that_are_damaged_on_the_way(folder: Path, tmp_path: Path) -> None:
    write(folder / "a.parquet", of_hub(rows(30)))
    near, _ = open_parts(folder / "a.parquet")
    with serving(folder) as serves:
        far, _ = open_parts(Path(f"{serves.url}/a.parquet"), cache=CacheOptions(tmp_path / "one"))
        shard_of(far).files._cache = CacheOptions(tmp_path / "two")
        seen: set[str | None] = set()

        def fault(request: Any) -> Fault:
            is_first = request.range not in seen
            seen.add(request.range)
            return Fault(flip=is_first)

        serves.fault = fault
        same(far, near)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("column", ["image", "mask"])
def test_no_file_of_this_machine_is_read(
    folder: Path, tmp_path: Path, cache: CacheOptions, kind: str, column: str
) -> None:
    """A row may name a file instead of its bytes, which in a store is that of somebody else."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(mask_png(1))
    columns = {
        "image": [{"bytes": png(at), "path": "a.png"} for at in range(4)],
        "mask": [{"bytes": mask_png(at), "path": "a.png"} for at in range(4)],
    }
    columns[column][2] = {"bytes": None, "path": f"{secret}"}
    write(folder / f"a.{kind}", pa.table(columns))
    with serving(folder) as serves, pytest.raises(InputError) as caught:
        open_parts(Path(f"{serves.url}/a.{kind}"), cache=cache)
    first, second = str(caught.value).splitlines()
    assert first == (
        f"{serves.url}/a.{kind}, row 2: it holds the path of an image, and not its bytes"
    )
    assert second.startswith("Pack the table where these files are")


def test_rows_without_an_image_are_bad_images(folder: Path, cache: CacheOptions) -> None:
    columns = rows(9)
    columns["image"][3] = {"bytes": None, "path": None}
    write(folder / "a.parquet", of_hub(columns))
    with serving(folder) as serves:
        far, _ = open_parts(Path(f"{serves.url}/a.parquet"), cache=cache)
    with pytest.raises(OSError, match="holds no image here"):
        far.read(3)
    assert far.read(4) == png(4)


def test_an_index_comes_back_as_it_was_and_damage_is_refused(folder: Path, tmp_path: Path) -> None:
    for at in range(8):
        for sub, data in (("images", png(at)), ("masks", mask_png(at))):
            (tmp_path / "photos" / sub).mkdir(parents=True, exist_ok=True)
            (tmp_path / "photos" / sub / f"{at:02}.png").write_bytes(data)
    assert main(["pack", f"{tmp_path}/photos", f"{folder}/a.parquet", "--shards", "2"]) == 0
    data = (folder / f"a.parquet{SHARDS_INDEX}").read_bytes()
    shards = read_index(data, "here")
    assert write_index(shards) == data
    for part in range(60):
        damaged = bytearray(data)
        damaged[len(data) * part // 60] ^= 0x55
        try:
            again = read_index(bytes(damaged), "here")
        except DamagedData:
            continue
        assert write_index(again) == data


def test_an_index_with_images_of_any_size_is_refused(folder: Path, tmp_path: Path) -> None:
    """Sizes that no file of this size unpacks to."""
    for at in range(8):
        path = tmp_path / "photos" / "ab"[at % 2] / f"{at}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(at))
    assert main(["pack", f"{tmp_path}/photos", f"{folder}/a.parquet", "--shards", "2"]) == 0
    data = (folder / f"a.parquet{SHARDS_INDEX}").read_bytes()
    for factor in (1 << 20, 1 << 40):
        with np.load(io.BytesIO(data)) as stored:
            arrays = {name: stored[name] for name in stored.files}
        arrays["sizes"] = arrays["sizes"] * factor
        file = io.BytesIO()
        np.savez(file, **arrays)
        with pytest.raises(DamagedData, match=r"^here is damaged"):
            read_index(file.getvalue(), "here")


def test_packing_leaves_no_copies(folder: Path, tmp_path: Path, capfd: Any) -> None:
    for name in NAMES:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for at in range(4):
            (tmp_path / "photos" / name / f"{at}.png").write_bytes(png(at))
    assert main(["pack", f"{tmp_path}/photos", f"{folder}/a.parquet", "--shards", "2"]) == 0
    assert "copied" not in "".join(capfd.readouterr())
    assert not (tmp_path / "copies").exists()
    assert sorted(path.name for path in folder.iterdir()) == [
        "a-00000-of-00002.parquet",
        "a-00001-of-00002.parquet",
        "a.classes.txt",
        f"a.parquet{SHARDS_INDEX}",
        "a.parquet.pack.json",
    ]
