"""`wrap` and `Run` on a path or an address: the batches of the local file, in one order, wherever it lies."""

import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torchvision import transforms, tv_tensors
from torchvision.transforms import v2

from flambeau import InputError, Run, wrap
from flambeau.data.pack.encode_images import Conversion
from flambeau.data.pack.pack import pack
from flambeau.data.pack.shard_plan import Split
from flambeau.data.sources.open_data import open_sources
from flambeau.data.sources.targets import TargetChoice
from object_server import ObjectServer, serving
from same_sources import mask_png, png

NUM = 60


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    generator = np.random.default_rng(0)
    for number in range(NUM):
        path = folder / "photos" / ("cat", "dog")[number % 2] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 255, (20, 24, 3), np.uint8)
        Image.fromarray(pixels).save(path)
    pack(folder / "photos", folder / "pets.tar", Conversion(), Split(shards=3), workers=1)
    return folder


@pytest.fixture
def server(packed: Path) -> Iterator[ObjectServer]:
    with serving(packed, lists=True) as serves:
        yield serves


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/default_cache")
    monkeypatch.setattr("flambeau.data.sources.sample_blocks.BLOCK_BYTES", 5_000)


def noisy(image: Image.Image) -> Tensor:
    """Draws, as augmentation does."""
    assert image.mode == "RGB"
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255 + torch.rand(())


def plain(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def epochs_of(batches: Any, count: int = 2) -> list[tuple[Tensor, Tensor]]:
    return [(images, labels) for _ in range(count) for images, labels in batches]


def same(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b)
        for pair in zip(one, other, strict=True)
        for a, b in zip(*pair, strict=True)
    )


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_of_the_local_file(
    server: ObjectServer, packed: Path, workers: int, window: int
) -> None:
    near = wrap(packed / "pets.tar", noisy, batch_size=8, seed=3, shuffle_window=window)
    expected = epochs_of(near)
    assert near.dataset.classes == ("cat", "dog")
    assert near.dataset.targets.bincount().tolist() == [30, 30]
    assert len(expected) == 2 * len(near) == 16
    for address in (f"{server.url}/pets.tar", f"file://{packed}/pets.tar"):
        far = wrap(
            address,
            noisy,
            batch_size=8,
            seed=3,
            workers=workers,
            shuffle_window=window,
            cache="cache",
        )
        assert same(epochs_of(far), expected)
    assert any(Path("cache/blocks").rglob("*"))
    assert not Path("default_cache").exists()
    asked = len(server.requests)
    again = wrap(f"{server.url}/pets.tar", noisy, batch_size=8, seed=3, cache="cache")
    list(again)
    ranges = [one for one in server.requests[asked:] if one.range and one.name.endswith(".tar")]
    assert not ranges, "the blocks are in the cache"


def test_many_images_of_a_store_have_an_order_in_two_levels(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flambeau.data.sources.block_shuffle.WINDOW", 7)
    address = f"file://{packed}/pets.tar"
    far = wrap(address, plain, batch_size=8)
    assert far.dataset.window == 7
    near = wrap(packed / "pets.tar", plain, batch_size=8)
    assert near.dataset.window == 0
    assert not same(epochs_of(far, 1), epochs_of(near, 1))
    near = wrap(packed / "pets.tar", plain, batch_size=8, shuffle_window=7)
    assert same(epochs_of(far, 1), epochs_of(near, 2)[8:])  # the second epoch of both
    in_order = wrap(address, plain, batch_size=NUM, shuffle=False)
    assert torch.equal(next(iter(in_order))[1], far.dataset.targets)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_goes_on_elsewhere(server: ObjectServer, packed: Path, workers: int) -> None:
    whole = epochs_of(wrap(packed / "pets.tar", noisy, batch_size=8, shuffle_window=9))
    begun = wrap(f"{server.url}/pets.tar", noisy, batch_size=8, shuffle_window=9)
    seen = list(itertools.islice(begun, 3))
    assert same(seen, whole[:3])
    state = begun.state_dict()
    assert state == {"epoch": 0, "position": 24, "shuffle_window": 9, "shuffle_streams": 48}
    other = wrap(
        f"{server.url}/pets.tar",
        noisy,
        batch_size=8,
        workers=workers,
        shuffle_window=9,
        cache="other",
    )
    other.load_state_dict(state)
    assert same(epochs_of(other), whole[3:])
    with pytest.raises(InputError, match="in an order with shuffle_window = 9, and here it is 0"):
        wrap(f"{server.url}/pets.tar", noisy, batch_size=8).load_state_dict(state)


def test_a_position_of_an_earlier_version_is_refused_but_not_its_epochs(packed: Path) -> None:
    """Without `shuffle_streams` the order was another one."""
    whole = epochs_of(wrap(packed / "pets.tar", noisy, batch_size=8, shuffle_window=9))
    other = wrap(packed / "pets.tar", noisy, batch_size=8, shuffle_window=9)
    with pytest.raises(InputError, match="epoch 1 is one in an order of another version"):
        other.load_state_dict({"epoch": 1, "position": 24, "shuffle_window": 9})
    other.load_state_dict({"epoch": 1, "position": 0, "shuffle_window": 9})
    assert same(epochs_of(other, 1), whole[8:])
    permuted = wrap(packed / "pets.tar", noisy, batch_size=8)
    permuted.load_state_dict({"epoch": 0, "position": 24, "shuffle_window": 0})
    assert len(epochs_of(permuted, 1)) == 5


def test_ranks_share_the_batches(
    server: ObjectServer, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = epochs_of(wrap(packed / "pets.tar", noisy, batch_size=8, shuffle_window=9), 1)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        share = wrap(f"{server.url}/pets.tar", noisy, batch_size=8, shuffle_window=9)
        shares.append(epochs_of(share, 1))
    together = [
        (torch.cat([one[0], two[0]]), torch.cat([one[1], two[1]]))
        for one, two in zip(*shares, strict=True)
    ]
    assert same(together, whole)


def test_parts_are_those_of_a_training(packed: Path) -> None:
    for name in ("pets.tar", "photos"):
        for number, part in enumerate(("train", "val")):
            batches = wrap(packed / name, plain, batch_size=8, part=part)  # type: ignore[arg-type]
            expected = open_sources(packed / name)[number]
            assert len(batches.dataset) == len(expected)
            assert [batches.dataset.describe(at) for at in range(len(expected))] == [
                expected.describe(at) for at in range(len(expected))
            ]
    for part in ("train", "val"):
        shutil.copytree(packed / "photos", f"divided/{part}")
    with pytest.raises(
        InputError, match="divided has images to train on and others to validate on"
    ):
        wrap("divided", plain, batch_size=8)
    assert len(wrap("divided", plain, batch_size=8, part="val").dataset) == NUM


def test_the_next_blocks_are_fetched_while_a_batch_is_used(server: ObjectServer) -> None:
    """The two images of a batch are in two blocks at most, and the shards in six."""
    batches = iter(wrap(f"{server.url}/pets.tar", plain, batch_size=2, shuffle_window=2))
    next(batches)
    deadline = time.monotonic() + 30
    while len({(one.name, one.range) for one in server.requests if one.name.endswith(".tar")}) < 6:
        assert time.monotonic() < deadline, "nothing is fetched ahead"
        time.sleep(0.01)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_cannot_be_read_is_named(tmp_path: Path, workers: int) -> None:
    for number in range(4):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9)).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    batches = wrap("photos", plain, batch_size=2, workers=workers)
    with pytest.raises(InputError, match=r"photos/b/3\.png: not a JPEG.*\nRepair or remove it"):
        list(batches)
    with pytest.raises(IndexError, match="there is no image 4: there are 4"):
        batches.dataset[4]


@pytest.mark.parametrize(
    ("data", "given", "words"),
    [
        ("photos", {}, r"wrap\('photos'\) needs a function that makes a tensor of an image"),
        (
            "photos",
            {"transform": plain, "part": "test"},
            "part must be 'train' or 'val', got 'test'",
        ),
        ("photos", {"transform": plain, "cache": "c"}, "cache = 'c' is for data in a store"),
        (
            "photos",
            {"transform": plain, "cache_size": "1GB"},
            "cache_size = '1GB' is for data in a st",
        ),
        (
            "file:///none",
            {"transform": plain, "cache_size": "much"},
            "cache_size must be a size such",
        ),
        (
            "photos",
            {"transform": plain, "shuffle_window": 4},
            "shuffle_window = 4 is for images in .tar",
        ),
        ("photos", {"transform": plain, "shuffle_window": -1}, "shuffle_window must be at least 0"),
        (
            "photos",
            {"transform": plain, "shuffle_window": 4, "shuffle": False},
            "no effect with a sam",
        ),
        ("mine.py:data", {"transform": plain}, "mine.py:data is a function in a file: import it"),
        ("missing", {"transform": plain}, "missing does not exist"),
        (
            TensorDataset(torch.zeros(4)),
            {"transform": plain},
            "transform is for a path or an address",
        ),
        (
            TensorDataset(torch.zeros(4)),
            {"part": "val"},
            "part is for a path or an address, and the data",
        ),
    ],
)
def test_refusals(packed: Path, data: Any, given: dict[str, Any], words: str) -> None:
    Path("photos").symlink_to(packed / "photos")
    with pytest.raises(InputError, match=words):
        wrap(data, batch_size=4, **given)


# ---------------------------------------------------------------- masks and other targets

BOTH = v2.Compose(
    [
        v2.RandomResizedCrop(16, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
    ]
)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images and masks of 20 x 24 pixels, of 0, 1, 7 and what is ignored, in each format of shards."""
    folder = tmp_path_factory.mktemp("scenes")
    for kind in ("images", "masks"):
        (folder / "scenes" / kind).mkdir(parents=True)
    for number in range(20):
        (folder / "scenes" / "images" / f"{number:02}.png").write_bytes(png(number))
        mask = mask_png(number, (0, 1, 7, 255))
        (folder / "scenes" / "masks" / f"{number:02}.png").write_bytes(mask)
    for ending in ("tar", "zip", "parquet"):
        pack(folder / "scenes", folder / f"s.{ending}", Conversion(), Split(shards=2), workers=1)
    return folder


def image_and_mask(image: Image.Image, mask: tv_tensors.Mask) -> tuple[Tensor, Tensor]:
    assert type(mask) is tv_tensors.Mask
    return plain(image), mask + torch.zeros((), dtype=torch.uint8)


def test_masks_come_with_their_images(scenes: Path) -> None:
    batches = wrap(scenes / "scenes", image_and_mask, batch_size=20, shuffle=False)
    assert batches.dataset.classes == ("0", "1", "7")
    assert batches.dataset.targets.shape == (20, 3)
    [(images, masks)] = batches
    assert type(images) is type(masks) is Tensor
    assert masks.dtype == torch.uint8
    for number, (image, mask) in enumerate(zip(images, masks, strict=True)):
        name = f"{number:02}.png"
        with Image.open(scenes / "scenes" / "images" / name) as stored:
            assert torch.equal(image, plain(stored))
        with Image.open(scenes / "scenes" / "masks" / name) as stored:
            numbers = torch.from_numpy(np.array(stored))
        positions = torch.where(numbers == 7, 2, numbers)  # the third class
        assert torch.equal(mask, positions)
        assert (mask == 255).any()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ending", ["tar", "zip", "parquet"])
def test_masks_of_a_store_are_those_of_the_local_file(
    scenes: Path, workers: int, ending: str
) -> None:
    near = epochs_of(wrap(scenes / f"s.{ending}", BOTH, batch_size=6, shuffle_window=9))
    assert near[0][0].shape == (6, 3, 16, 16)
    assert near[0][1].shape == (6, 16, 16)
    with serving(scenes, lists=True) as serves:
        address = f"{serves.url}/s.{ending}"
        far = wrap(address, BOTH, batch_size=6, workers=workers, shuffle_window=9)
        begun = epochs_of(far, 1)
        assert same(begun, near[: len(begun)])
        again = wrap(address, BOTH, batch_size=6, shuffle_window=9, cache="another")
        again.load_state_dict(far.state_dict())
        assert same(epochs_of(again, 1), near[len(begun) :])


def test_image_and_mask_are_cropped_alike(tmp_path: Path) -> None:
    """A mask that is the image's red channel stays that."""
    for kind in ("images", "masks"):
        (tmp_path / "alike" / kind).mkdir(parents=True)
    for number in range(8):
        levels = np.kron(np.random.default_rng(number).integers(0, 3, (4, 5)), np.ones((9, 9)))
        levels = levels.astype(np.uint8)
        Image.fromarray(np.dstack([levels] * 3)).save(tmp_path / "alike/images" / f"{number}.png")
        Image.fromarray(levels).save(tmp_path / "alike/masks" / f"{number}.png")
    steps = v2.Compose([v2.RandomCrop(20), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    for images, masks in wrap(tmp_path / "alike", steps, batch_size=4):
        assert torch.equal(images[:, 0], masks)


@pytest.mark.parametrize(
    "transform", [plain, transforms.Compose([transforms.ToTensor()]), nn.Sequential(nn.Identity())]
)
def test_a_transform_of_images_alone_is_refused_where_there_are_masks(
    scenes: Path, transform: Any
) -> None:
    with pytest.raises(InputError, match=r"00.png has a mask, and the transform takes an image al"):
        wrap(scenes / "scenes", transform, batch_size=2)


def test_what_is_wrong_with_a_mask_is_named(scenes: Path) -> None:
    batches = wrap(scenes / "scenes", lambda image, mask: image, batch_size=2)
    with pytest.raises(InputError, match=r"\d\d.png: the transform of an image and its mask retur"):
        list(batches)
    shutil.copytree(scenes / "scenes", "damaged")
    Path("damaged/masks/03.png").write_bytes(b"no mask")
    with pytest.raises(InputError, match=r"03.png: its mask .*03.png.*\nRepair or remove it"):
        list(wrap("damaged", BOTH, batch_size=2))
    Path("damaged/masks/03.png").write_bytes(mask_png(3, width=9))
    with pytest.raises(
        InputError, match=r"03\.png: its mask has 9 x 20 pixels, and the image 24 x "
    ):
        list(wrap("damaged", BOTH, batch_size=2))


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_several_labels_and_numbers(packed: Path, task: str) -> None:
    rows = ["path,a,b"]
    for number, path in enumerate(sorted((packed / "photos").rglob("*.png"))):
        values = (number % 2, number % 3 == 0) if task == "multilabel" else (number / 7, -number)
        rows.append(f"{path},{float(values[0])},{float(values[1])}")
    Path("data.csv").write_text("\n".join(rows))
    Path("out").mkdir()
    choice = TargetChoice(task=task, columns=("a", "b"))  # type: ignore[arg-type]
    split = Split(shards=2)
    pack(Path("data.csv"), Path("out/p.tar"), Conversion(), split, workers=1, choice=choice)
    near = wrap("out/p.tar", noisy, batch_size=8)
    expected = epochs_of(near, 1)
    assert near.dataset.classes == ("a", "b")
    assert expected[0][1].dtype == torch.float32
    assert expected[0][1].shape == (8, 2)
    with serving(Path("out").absolute(), lists=True) as serves:
        far = wrap(f"{serves.url}/p.tar", noisy, batch_size=8, workers=1)
        assert same(epochs_of(far, 1), expected)
        assert torch.equal(far.dataset.targets, near.dataset.targets)


# ---------------------------------------------------------------- Run


class Stopped(Exception):
    """In the place of a kill."""


def trained(folder: str, data: Any, *, until: int | None = None, workers: int = 0) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 20 * 24, 2), nn.Dropout(0.2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = Run(
        folder, model, optimizer, data, duration="2ep", batch_size=8, seed=5, workers=workers,
        checkpoint_every="2st", bar=False,
    )  # fmt: skip
    for _ in run.epochs():
        for images, labels in run.batches():
            if run.state.step == until:
                raise Stopped
            run.step(cross_entropy(model(images), labels))
        for images, labels in run.evaluate(data):
            run.log(val_accuracy=model(images).argmax(1) == labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_is_that_on_the_local_file_and_goes_on_with_either(
    server: ObjectServer, packed: Path, workers: int
) -> None:
    def opened(data: Any) -> Any:
        return wrap(data, noisy, batch_size=1, shuffle_window=9).dataset

    near = packed / "pets.tar"
    far = f"{server.url}/pets.tar"
    trained("near", opened(near))
    trained("far", opened(far), workers=workers)
    for run, one, other in (("a", near, far), ("b", far, near)):
        with pytest.raises(Stopped):
            trained(run, opened(one), until=5)
        trained(run, opened(other), workers=workers)
    expected = load_file("near/model.safetensors")
    for run in ("far", "a", "b"):
        found = load_file(f"{run}/model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in expected.items()), run


def test_a_run_does_not_go_on_in_another_order(packed: Path) -> None:
    def opened(window: int) -> Any:
        return wrap(packed / "pets.tar", plain, batch_size=1, shuffle_window=window).dataset

    with pytest.raises(Stopped):
        trained("run", opened(9), until=5)
    for window in (0, 960):
        with pytest.raises(InputError, match="sampler: 'BlockSampler, 60 samples"):
            trained("run", opened(window))


def test_what_is_far_away_is_named_by_its_address(
    server: ObjectServer, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = Path("other")
    shutil.copytree(packed, copied)
    shard = sorted(copied.glob("*.tar"))[0]
    shard.write_bytes(shard.read_bytes().replace(b"IDAT", b"IDAT"[::-1]))
    batches: Callable[[], Any] = lambda: wrap(  # noqa: E731
        f"file://{copied.absolute()}/pets.tar", plain, batch_size=4
    )
    with pytest.raises(InputError, match=rf"file://.*{shard.name}.*its bytes are not those"):
        list(batches())
