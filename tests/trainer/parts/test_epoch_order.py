"""`--shuffle-window`: one order for a file, its shards, workers and resumes; where it is refused."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from flambeau import train
from flambeau.data.pack.encode_images import Conversion
from flambeau.data.pack.pack import pack
from flambeau.data.pack.shard_plan import Split
from flambeau.data.sources.open_data import open_parts, open_source
from flambeau.data.sources.sample_blocks import block_lengths
from flambeau.data.sources.source import SubsetSource, hold_out, image_blocks
from flambeau.data.sources.wide_source import WideSource
from flambeau.errors import InputError
from flambeau.recipes.data.samplers import BlockSampler
from flambeau.trainer.parts import epoch_order
from flambeau.trainer.settings.settings import Settings

NUM = 60


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for k in range(NUM):
        path = tmp_path / "photos" / "abc"[k % 3] / f"{k:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (16, 16, 3), np.uint8)).save(path)
    return tmp_path / "photos"


def packed(folder: Path, name: str, **split: Any) -> Path:
    pack(folder, Path(name), Conversion(), Split(**split), workers=1)
    return Path(name)


@pytest.mark.parametrize("ending", ["tar", "rec", "tfrecord"])
def test_blocks_are_those_of_the_files(
    folder: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of what is held out, so that no block is read for two of another division."""
    monkeypatch.setattr("flambeau.data.sources.sample_blocks.BLOCK_BYTES", 4000)
    source, _ = open_parts(packed(folder, f"a.{ending}", shards=4))
    blocks = image_blocks(source)
    assert blocks is not None
    sizes = [len(source.read(index)) for index in range(NUM)]
    assert blocks.tolist() == block_lengths(np.array(sizes), np.array([15] * 4)).tolist()
    assert len(blocks) > 4
    of_block = np.repeat(np.arange(len(blocks)), blocks)
    names = list(source.names)
    for part in hold_out(source):
        blocks = image_blocks(part)
        assert blocks is not None
        numbers = of_block[[names.index(name) for name in part.names]]
        assert blocks.tolist() == np.unique(numbers, return_counts=True)[1].tolist()
    assert image_blocks(SubsetSource(source, torch.tensor([3, 1]))) is None
    assert image_blocks(open_source(folder, source.classes)) is None


def test_small_row_groups_are_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can only be fetched whole; larger ones are mixed in parts, which stay in the cache."""
    packed(folder, "a.parquet")
    table = pq.read_table("a.parquet")
    pq.write_table(table, "a.parquet", row_group_size=25)
    source, _ = open_parts(Path("a.parquet"))
    found = image_blocks(source)
    assert found is not None
    assert found.tolist() == [25, 25, 10]
    sizes = np.array([len(source.read(index)) for index in range(NUM)])
    monkeypatch.setattr(
        "flambeau.data.sources.sample_blocks.BLOCK_BYTES", sizes[50:].sum() // 4 + 1
    )
    found = image_blocks(open_parts(Path("a.parquet"))[0])
    assert found is not None
    larger = block_lengths(sizes[:50], np.array([25, 25]))
    assert len(larger) > 8
    assert found.tolist() == [*larger, 10]


def test_images_of_16_bits_lie_in_blocks_too(folder: Path) -> None:
    plain, _ = open_parts(packed(folder, "a.tar", shards=2))
    blocks, same = image_blocks(plain), image_blocks(WideSource(plain, "uint16"))
    assert blocks is not None
    assert same is not None
    assert same.tolist() == blocks.tolist()


@pytest.mark.parametrize("seed", range(10))
def test_blocks_hold_what_begins_within_their_bytes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flambeau.data.sources.sample_blocks.BLOCK_BYTES", 1000)
    draw = np.random.default_rng(seed)
    shards = draw.integers(0, 40, 5)
    sizes = draw.integers(0, 700, shards.sum())
    expected = []
    start = 0
    for count in shards.tolist():
        blocks: dict[int, int] = {}
        at = 0
        for size in sizes[start : start + count].tolist():
            blocks[at // 1000] = blocks.get(at // 1000, 0) + 1
            at += size
        expected += blocks.values()
        start += count
    assert block_lengths(sizes, shards).tolist() == expected


def weights_of(out: str, data: Path, **options: Any) -> dict[str, torch.Tensor]:
    import safetensors.torch

    options = {"epochs": 2, "model": "tiny_convnet", "batch_size": 16, "bar": False, **options}
    train(data, out=out, shuffle_window=8, seed=1, **options)
    return safetensors.torch.load_file(f"{out}/model.safetensors")


def test_a_window_is_one_order_for_workers_and_resumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flambeau.data.sources.sample_blocks.BLOCK_BYTES", 4000)
    data = packed(folder, "a.tar")
    expected = weights_of("one", data)
    other = weights_of("two", data, workers=2)
    assert all(torch.equal(expected[name], other[name]) for name in expected)
    orders = [
        epoch_order.epoch_sampler(
            Settings(shuffle_window=window),  # type: ignore[arg-type]
            open_parts(data)[0],
            streams=48,
        )
        for window in (8, 0, None)
    ]
    assert orders[1] is None and orders[2] is None and orders[0] is not None
    assert orders[0].order(0).tolist() != orders[0].order(1).tolist()
    assert "shuffle_window = 8" in Path("one/config.toml").read_text()


def test_a_run_that_began_with_fewer_streams_goes_on_with_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = packed(folder, "a.tar")
    with monkeypatch.context() as earlier:
        earlier.setattr("flambeau.trainer.parts.auto_settings.STREAMS", 16)
        weights_of("run", data, epochs=1)
    train(out="run", extend="1ep")
    assert json.loads(Path("run/dataset.json").read_text())["shuffle_streams"] == 16
    source = open_parts(data)[0]
    sampler = epoch_order.epoch_sampler(Settings(shuffle_window=8), source, streams=16)  # type: ignore[arg-type]
    blocks = image_blocks(source)
    assert sampler is not None
    expected = BlockSampler(blocks, window=8, streams=16).order(1)
    assert sampler.order(1).tolist() == expected.tolist()


def test_a_run_in_the_order_of_another_version_is_refused(folder: Path) -> None:
    """Such a run has no `shuffle_streams` in dataset.json: its order had one stream."""
    data = packed(folder, "a.tar")
    weights_of("run", data, epochs=1)
    facts = Path("run/dataset.json")
    described = json.loads(facts.read_text())
    assert described["shuffle_streams"] == 48
    del described["shuffle_streams"]
    facts.write_text(json.dumps(described))
    with pytest.raises(InputError, match="in the order of another version"):
        train(out="run", extend="1ep")


def test_where_it_has_no_effect_it_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"shuffle_window = 8 is for images in \.tar"):
        weights_of("run", folder)
    with pytest.raises(InputError, match="draws from all images: leave shuffle_window out"):
        Settings(shuffle_window=8, balance="full")
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "png")
    with tarfile.open("a.tar", "w") as tar:
        for name, data in (("0.png", content.getvalue()), ("0.cls", b"0")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert image_blocks(open_parts(Path("a.tar"))[0]) is not None


class Remote:
    """Images in a store, as far as the settings ask."""

    classes = ("a",)

    def __init__(self, count: int, *, has_sizes: bool = True) -> None:
        self._count = count
        if has_sizes:
            self.image_sizes = np.ones(count, np.int64)

    def __len__(self) -> int:
        return self._count

    def fetch_ahead(self, indices: Any) -> bool:
        return False


@pytest.mark.parametrize(
    ("count", "given", "found"),
    [
        (32_768, {}, None),
        (32_769, {}, 16_384),
        (40_000, {"balance": "full"}, None),
        (40_000, {"shuffle_window": 0}, 0),
    ],
)
def test_many_images_of_a_store_mix_in_a_window(
    count: int, given: dict[str, Any], found: int | None
) -> None:
    source: Any = Remote(count)
    assert epoch_order.shuffle_window(Settings(**given), source) == found


def test_images_of_a_store_beside_others_are_shuffled_whole() -> None:
    source: Any = Remote(40_000, has_sizes=False)
    assert epoch_order.shuffle_window(Settings(), source) is None
