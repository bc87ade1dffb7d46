"""Several nodes with caches of their own: each fetches its part of an epoch, to the bits of one node."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from flambeau import train, wrap
from flambeau.data.datasets.image_statistics import mean_std
from flambeau.data.loading.batch_layout import BatchLayout, FixedPartsLayout, Layout
from flambeau.data.loading.batch_plan import BatchPart, BatchPlan
from flambeau.data.loading.stream_order import STREAMS, NeighboursByTurns
from flambeau.data.pack.encode_images import Conversion
from flambeau.data.pack.pack import pack
from flambeau.data.pack.shard_plan import Split
from flambeau.data.sources.open_data import open_sources
from flambeau.data.stores.block_cache import CacheOptions
from flambeau.recipes.data.samplers import BlockSampler
from flambeau.recipes.parallel.fixed_order_sum import parts_of
from object_server import Fault, ObjectServer, serving
from shared_fixtures import StartRanks

NUM = 1280
BLOCK = 12_000  # 8 images
WINDOW = 400


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    generator = np.random.default_rng(0)
    for part, count in (("train", NUM), ("val", NUM // 4)):
        for number in range(count):
            path = folder / "photos" / part / ("cat", "dog")[number % 2] / f"{number:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 255, (20, 24, 3), np.uint8)
            Image.fromarray(pixels).save(path)
    pack(folder / "photos", folder / "pets.tar", Conversion(), Split(shards=4), workers=1)
    for part in ("train", "val"):
        (folder / "pets" / part).mkdir(parents=True)
        for path in folder.glob(f"pets_{part}*"):
            path.rename(folder / "pets" / part / path.name)
        shutil.copy(folder / "pets.classes.txt", folder / "pets" / part)
    return folder


@pytest.fixture
def server(packed: Path) -> Iterator[ObjectServer]:
    with serving(packed, lists=True) as serves:
        yield serves


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/default_cache")
    monkeypatch.setattr("flambeau.data.sources.sample_blocks.BLOCK_BYTES", BLOCK)


def size_of(packed: Path, part: str) -> int:
    return sum(path.stat().st_size for path in (packed / "pets" / part).glob("*.tar"))


# ---------------------------------------------------------------- the shares of a forward pass


def an_epoch(order: Any, layout: Layout, *, position: int = 0) -> list[BatchPart]:
    return list(
        BatchPlan(
            layout,
            lambda epoch: order.order(epoch).numpy(),
            repeats=False,
            length=len(order),
            epoch=2,
            position=position,
            epochs=1,
            stream_of=order.stream_of.numpy(),
        )
    )


@pytest.mark.parametrize("length", [640, 641, 655, 37, 5])
@pytest.mark.parametrize("size", [32, 20, 7])
def test_a_forward_pass_holds_the_same_samples_for_any_number_of_ranks(
    length: int, size: int
) -> None:
    lengths = [5] * (length // 5) + ([length % 5] if length % 5 else [])
    for order in (
        BlockSampler(lengths, window=80, streams=STREAMS, seed=1),
        NeighboursByTurns(length),
    ):
        expected = order.order(2).tolist()
        assert sorted(expected) == list(range(length))
        alone = an_epoch(order, BatchLayout(size))
        for part in alone:
            assert sorted(part.indices) == sorted(expected[part.cut.low : part.cut.high])
        seen = sorted(index for part in alone for index in part.indices.tolist())
        assert seen == list(range(length))
        for world in (2, 3):
            ranks = [an_epoch(order, BatchLayout(size, rank=k, world=world)) for k in range(world)]
            for one, *shares in zip(alone, *ranks, strict=True):
                local = [
                    share.indices[share.cut.local] for share in shares if not share.cut.is_stand_in
                ]
                assert np.concatenate(local).tolist() == one.indices.tolist()
        later = an_epoch(order, BatchLayout(size), position=size)
        assert [part.indices.tolist() for part in later] == [
            part.indices.tolist() for part in alone[1:]
        ] or len(alone) == 1


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_parts_hold_the_same_samples_and_ranks_have_streams_of_their_own(world: int) -> None:
    order = BlockSampler([5] * 192, window=80, streams=STREAMS, seed=1)
    stream = torch.empty(960, dtype=torch.int64)
    stream[order.order(2).long()] = order.stream_of.repeat(20)
    found: dict[int, list[int]] = {}
    streams = []
    for rank in range(world):
        parts = an_epoch(order, FixedPartsLayout(96, 8, rank, world))
        streams.append(set[int]())
        for part in parts:
            indices = part.indices[part.cut.local]
            found[part.cut.draw] = indices.tolist()
            streams[-1].update(stream[torch.from_numpy(indices)].tolist())
    alone = an_epoch(order, FixedPartsLayout(96, 8))
    assert found == {one.cut.draw: one.indices[one.cut.local].tolist() for one in alone}
    assert sum(map(len, streams)) == STREAMS


# ---------------------------------------------------------------- what is fetched


def plain(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def share(monkeypatch: pytest.MonkeyPatch, address: str, rank: int, world: int, **more: Any) -> Any:
    """The batches of one of several nodes, which has a cache of its own."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: world)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    return wrap(address, plain, batch_size=96, part="train", cache=f"cache{world}-{rank}", **more)


@pytest.mark.parametrize(("world", "most"), [(1, 1.0), (2, 1.02), (3, 1.03), (4, 1.04)])
def test_nodes_fetch_together_what_one_does(
    server: ObjectServer,
    packed: Path,
    monkeypatch: pytest.MonkeyPatch,
    world: int,
    most: float,
) -> None:
    """Of 160 blocks those at the edges of their shares are fetched twice."""
    size = size_of(packed, "train")
    address = f"{server.url}/pets/"
    local = wrap(packed / "pets", plain, batch_size=96, part="train", shuffle_window=WINDOW)
    alone = [[images for images, _ in local] for _ in range(2)]
    nodes = [
        share(monkeypatch, address, rank, world, shuffle_window=WINDOW) for rank in range(world)
    ]
    before = server.sent
    first = [[images for images, _ in node] for node in nodes]
    assert 0.9 * size < server.sent - before <= most * size
    fetched = server.sent
    second = [[images for images, _ in node] for node in nodes]
    assert server.sent == fetched, "a node has the same blocks in each epoch"
    for shares, whole in ((first, alone[0]), (second, alone[1])):
        for *parts, expected in zip(*shares, whole, strict=True):
            assert torch.equal(torch.cat(parts), expected)


def test_without_streams_each_node_fetches_nearly_all(
    server: ObjectServer, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the streams are for: the same order of blocks, of one stream."""
    monkeypatch.setattr("flambeau.data.sources.block_shuffle.STREAMS", 1)
    before = server.sent
    for rank in range(2):
        for _ in share(monkeypatch, f"{server.url}/pets/", rank, 2, shuffle_window=WINDOW):
            pass
    assert server.sent - before > 1.7 * size_of(packed, "train")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_statistics_of_many_blocks_fetch_single_images(
    server: ObjectServer, packed: Path, is_damaged: bool
) -> None:
    """Else the rank that makes them would fetch the blocks of the others, too."""
    expected = mean_std(open_sources(packed / "pets")[0], channels=3, limit=100)
    options = CacheOptions(Path("cache"))
    source, _ = open_sources(Path(f"{server.url}/pets/"), cache=options)
    if is_damaged:  # on the way, the first time
        server.fault = lambda request: Fault(flip=request.number == 2)
    before = server.sent
    assert mean_std(source, channels=3, limit=100) == expected
    fetched = server.sent - before
    sizes = [len(source.read(index)) for index in range(len(source))]
    assert fetched <= 100 * max(sizes) + 8 * BLOCK * is_damaged
    assert fetched >= 100 * min(sizes)
    before = server.sent
    assert mean_std(source, channels=3, limit=100) == expected
    assert server.sent == before, "all blocks are in the cache"


def test_statistics_of_few_blocks_fetch_these(server: ObjectServer) -> None:
    options = CacheOptions(Path("cache"))
    source, _ = open_sources(Path(f"{server.url}/pets/"), cache=options)
    mean_std(source, channels=3, limit=1000)
    before = server.sent
    for index in range(len(source)):
        source.read(index)
    assert server.sent == before


# ---------------------------------------------------------------- trainings


def trained(data: str, run: str) -> None:
    """As a node of its own: the cache is that of the rank."""
    os.environ["FLAMBEAU_CACHE"] = f"cache-of-{os.environ.get('RANK', '0')}-{run}"
    train(
        data, out=run, epochs=2, image_size=72, model="tiny_convnet", batch_size=64, parts=8,
        shuffle_window=WINDOW, device="cpu", checkpoint_every="3st", seed=3, bar=False,
    )  # fmt: skip


def same_bits(one: str, other: str) -> None:
    expected, found = (load_file(Path(run, "model.safetensors")) for run in (one, other))
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_nodes_train_to_the_bits_of_one_and_share_what_is_fetched(
    server: ObjectServer, packed: Path, start_ranks: StartRanks, world: int
) -> None:
    """Parts are dealt whole, so that 3 nodes have streams of their own, too."""
    start_ranks(1, trained, f"{packed}/pets", "near").results()
    address = f"{server.url}/pets/"
    start_ranks(world, trained, address, "far").results()
    same_bits("near", "far")
    # Rank 0 alone has read images of all blocks before, for their mean.
    size = size_of(packed, "train") + size_of(packed, "val")
    for rank in range(1, world):
        blocks = Path(f"cache-of-{rank}-far", "blocks").rglob("*")
        cached = sum(path.stat().st_size for path in blocks if path.is_file())
        most = len(parts_of(rank, world, 8)) / 8
        assert cached < (most + 0.05) * size
    job = start_ranks(world, trained, address, "killed")
    deadline = time.monotonic() + 120
    while not Path("killed/checkpoints/step-00000024").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    job.stop()
    start_ranks(world - 1, trained, address, "killed").results()
    same_bits("near", "killed")
