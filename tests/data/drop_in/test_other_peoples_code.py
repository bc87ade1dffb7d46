"""`fast(loader)` under the code that people have around a loader: what was right before stays right."""

import copy
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from PIL.PngImagePlugin import PngImageFile
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    default_collate,
    get_worker_info,
)
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from flambeau.data.drop_in import fast_loader
from flambeau.data.drop_in.batch_memory import BatchMemory, SpareMemory
from flambeau.data.fast import fast
from flambeau.errors import InputError

# On one CPU torch warns of two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
NORMALIZE = v1.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
TRAINING = v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor()])
EVALUATION = v1.Compose([v1.Resize((24, 24)), v1.ToTensor(), NORMALIZE])
WAYS = [{}, {"threads": 2}, {"workers": 1}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("people")
    generator = np.random.default_rng(0)
    for number in range(12):
        path = root / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(exist_ok=True)
        small = generator.integers(0, 256, (6, 7, 3), dtype=np.uint8)
        Image.fromarray(small).resize((70 + number, 60), Image.Resampling.BICUBIC).save(path)
    return root


class Reads(Dataset[Any]):
    """A data set of one function."""

    def __init__(self, read: Callable[[int], Any], count: int = 12) -> None:
        self.read, self.count = read, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


def opened(folder: Path, index: int) -> Image.Image:
    return Image.open(sorted(folder.glob("*/*.jpg"))[index])


# ---------------------------------------------------------------- seeds


@pytest.mark.parametrize("how", ["seed", "state", "state of a fork"])
@pytest.mark.parametrize("workers", [0, 1])
def test_image_and_mask_are_changed_alike_by_the_same_seed(
    folder: Path, how: str, workers: int
) -> None:
    """The old way of segmentation: seed, change the image, seed the same again, change the mask."""
    nearest = v1.RandomResizedCrop(24, interpolation=v1.InterpolationMode.NEAREST)
    for_masks = v1.Compose([nearest, v1.RandomHorizontalFlip(), v1.ToTensor()])

    def read(index: int) -> Any:
        image = opened(folder, index).convert("RGB")
        if how == "seed":
            seed = int(torch.randint(2**31, ()))
            torch.manual_seed(seed)
            first = TRAINING(image), for_masks(image)
            torch.manual_seed(seed)
            again = TRAINING(image), for_masks(image)
            torch.manual_seed(seed)
            return first, again, TRAINING(image), seed
        if how == "state":
            state = torch.get_rng_state()
            first = TRAINING(image)
            torch.set_rng_state(state)
        else:
            with torch.random.fork_rng():
                first = TRAINING(image)
        return first, TRAINING(image), TRAINING(image)

    batches = list(fast(DataLoader(Reads(read), batch_size=4), workers=workers))
    for batch in batches:
        torch.testing.assert_close(batch[0], batch[1], rtol=0, atol=0)
        if how == "seed":
            torch.testing.assert_close(batch[0][0], batch[2], rtol=0, atol=0)
        else:
            assert not torch.equal(batch[0], batch[2])
    if how == "seed":  # and what that seed has always given
        torch.manual_seed(int(batches[0][3][0]))
        expected = TRAINING(opened(folder, 0).convert("RGB"))
        assert torch.equal(batches[0][0][0][0], expected)


@pytest.mark.parametrize("how", ["seed", "state"])
@pytest.mark.parametrize("workers", [0, 1])
def test_image_and_mask_are_changed_alike_by_pythons_generator(
    folder: Path, how: str, workers: int
) -> None:
    """timm's crop and erasing draw from Python's `random`, and so does the choice of torchvision v1."""
    crop = RandomResizedCropAndInterpolation(24, interpolation="random")
    erase = RandomErasing(probability=1.0, mode="const", device="cpu")
    timms = v1.Compose([crop, v1.ToTensor(), erase])
    turns = [v1.RandomVerticalFlip(1), v1.RandomHorizontalFlip(1), v1.RandomHorizontalFlip(0)]
    chosen = v1.Compose([v1.Resize((9, 8)), v1.RandomChoice(turns), v1.ToTensor()])

    def read(index: int) -> Any:
        image = opened(folder, index).convert("RGB")
        if how == "seed":
            random.seed(index)
            first = timms(image), chosen(image)
            random.seed(index)
            return first, (timms(image), chosen(image))
        random.random()
        state = random.getstate()
        first = timms(image), chosen(image)
        random.setstate(state)
        return first, (timms(image), chosen(image)), (timms(image), chosen(image))

    loader = DataLoader(Reads(read), batch_size=12)
    [batch] = fast(loader, workers=workers)
    for first, second in zip(batch[0], batch[1], strict=True):
        assert torch.equal(first, second)
    if how == "state":
        assert not torch.equal(batch[0][0], batch[2][0])
        assert not torch.equal(batch[0][1], batch[2][1])
    else:  # and what that seed has always given
        assert torch.equal(batch[0][0], next(iter(loader))[0][0])


def test_python_set_back_leaves_torchs_draws_alone(folder: Path) -> None:
    """A flip is drawn from torch's generator, so it is not repeated with timm's crop before it."""
    crop = RandomResizedCropAndInterpolation(24, scale=(1, 1), ratio=(1, 1))
    both = v1.Compose([crop, v1.RandomHorizontalFlip(), v1.ToTensor()])

    def read(index: int) -> Any:
        image = opened(folder, 0).convert("RGB")
        state = random.getstate()
        first = both(image)
        random.setstate(state)
        return first, both(image)

    [(first, second)] = fast(DataLoader(Reads(read, 40), batch_size=40))
    same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(first, second, strict=True)]
    assert all(a != b for a, b in zip(same, mirrored, strict=True)), (
        "the same crop, mirrored or not"
    )
    assert 8 < sum(same) < 32


@pytest.mark.parametrize("version", [v1, v2])
def test_transforms_inside_of_others_draw_numbers_of_their_own(folder: Path, version: Any) -> None:
    across, down = version.RandomHorizontalFlip(), version.RandomVerticalFlip()
    never = version.RandomVerticalFlip(0)
    nested = version.RandomApply([version.RandomApply([across], p=1), never, down], p=1)
    deep = version.RandomApply([version.RandomApply([nested], p=1)], p=1)
    plain = v1.ToTensor()(EVALUATION.transforms[0](opened(folder, 0)))
    ways = [plain.flip(dims) for dims in ([], [2], [1], [1, 2])]
    for outer in (nested, deep):
        steps = v1.Compose([v1.Resize((24, 24)), outer, v1.ToTensor()])
        dataset = Subset(ImageFolder(folder, steps), [0] * 48)
        [(images, _)] = fast(DataLoader(dataset, batch_size=48))
        found = [[torch.equal(image, way) for way in ways].index(True) for image in images]
        assert {*found} == {0, 1, 2, 3}


def test_collate_fn_that_draws_does_not_disturb_the_training(folder: Path) -> None:
    def mixed(samples: list[Any]) -> Any:
        images, labels = default_collate(samples)
        return images.lerp(images.flip(0), torch.rand(())), labels, torch.rand(()), random.random()

    def run(**ways: Any) -> tuple[list[Any], list[float]]:
        torch.manual_seed(5)
        random.seed(5)
        quick = fast(
            DataLoader(ImageFolder(folder, TRAINING), batch_size=3, collate_fn=mixed), **ways
        )
        training, shares = [], []
        for _, _, share, other in quick:
            training.append((float(torch.rand(())), random.random()))
            shares.append((float(share), other))
        return training, shares

    expected = run()
    assert len({share for share, _ in expected[1]}) == 4
    for ways in (*WAYS, {"threads": 1}):
        assert run(**ways) == expected


def test_generators_of_devices_are_not_seeded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(seed: int) -> None:
        raise AssertionError(
            "torch.manual_seed seeds the devices too, and they draw for the training"
        )

    quick = fast(DataLoader(Reads(lambda index: float(torch.rand(()))), batch_size=3))
    monkeypatch.setattr(torch, "manual_seed", refuse)
    assert len(torch.cat(list(quick)).unique()) == 12


def test_batch_sampler_that_draws_when_it_begins(folder: Path) -> None:
    class Drawing:
        def __iter__(self) -> Iterator[list[int]]:
            return iter(torch.randperm(12).view(4, 3).tolist())

        def __len__(self) -> int:
            return 4

    loader = DataLoader(Reads(int), batch_sampler=Drawing())  # type: ignore[arg-type]
    found = []
    for way in (loader, fast(loader)):
        torch.manual_seed(1)
        found.append([batch.tolist() for _ in range(2) for batch in way])
    assert found[0] == found[1]


def test_sampler_without_an_end() -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(12))

    quick = fast(DataLoader(Reads(int), batch_size=5, sampler=Endless()))  # type: ignore[arg-type]
    assert [batch.tolist()[0] for batch in itertools.islice(quick, 6)] == [0, 5, 10, 3, 8, 1]


def test_batches_of_any_iterable(folder: Path) -> None:
    batches = [iter([0, 1, 2]), torch.tensor([4, 5]), np.array([6])]
    loader = DataLoader(ImageFolder(folder, EVALUATION), batch_sampler=batches)  # type: ignore[arg-type]
    assert [len(labels) for _, labels in fast(loader)] == [3, 2, 1]


# ---------------------------------------------------------------- workers


class Drawing(Reads):
    """Draws from a generator of its own, which `worker_init_fn` makes."""

    generator: Any = None

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        return float(self.generator.random()), info.dataset is self


def start(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.generator = np.random.default_rng(info.seed)


@pytest.mark.parametrize(
    ("context", "persistent"), [("fork", False), ("fork", True), ("spawn", True)]
)
def test_worker_init_fn_finds_the_data_set_and_another_seed_each_time(
    context: str, persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(
        str(Path(__file__).parents[3])
    )  # where a new process finds this module
    loader = DataLoader(
        Drawing(int), batch_size=6, num_workers=1, worker_init_fn=start,
        persistent_workers=persistent, multiprocessing_context=context,
    )  # fmt: skip
    quick, found = fast(loader), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        for _ in range(1 if context == "spawn" else 2):
            for numbers, is_same in quick:
                assert is_same.all()
                found += numbers.tolist()
        quick = copy.copy(quick)
    assert len(set(found)) == len(found), "each epoch and each seed of torch's has its own numbers"


# ---------------------------------------------------------------- data sets


class OnlyBatches(Dataset[Any]):
    """Gives samples a batch at a time, as Hugging Face's data sets do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 12

    def __getitems__(self, indices: list[int]) -> Any:
        images = [EVALUATION(opened(self.folder, index).convert("RGB")) for index in indices]
        return [(image, index, len(indices)) for image, index in zip(images, indices, strict=True)]


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("part", [False, True])
def test_data_set_that_is_asked_for_whole_batches(
    folder: Path, ways: dict[str, int], part: bool
) -> None:
    dataset: Any = OnlyBatches(folder)
    loader = DataLoader(Subset(dataset, range(2, 9)) if part else dataset, batch_size=5)
    for found, expected in zip(fast(loader, **ways), loader, strict=True):
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[2], expected[2])
        assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("ways", WAYS[:2])
@pytest.mark.parametrize("is_whole", [False, True])
def test_images_of_code_that_is_not_known_are_not_copied_either(
    folder: Path, ways: dict[str, int], is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset: Any = OnlyBatches(folder)
    if not is_whole:
        dataset = Reads(lambda index: EVALUATION(opened(folder, index).convert("RGB")))
    expected = [batch[0] if is_whole else batch for batch in DataLoader(dataset, batch_size=5)]
    stack = torch.stack

    def only_labels(tensors: Any, *args: Any, **settings: Any) -> Any:
        assert tensors[0].ndim == 0, "images were copied"
        return stack(tensors, *args, **settings)

    monkeypatch.setattr(torch, "stack", only_labels)
    for batch, images in zip(
        fast(DataLoader(dataset, batch_size=5), **ways), expected, strict=True
    ):
        assert torch.equal(batch[0] if is_whole else batch, images)


@pytest.mark.parametrize("ways", WAYS)
def test_data_set_that_gives_batches_ready_made(ways: dict[str, int]) -> None:
    class Ready(Reads):
        def __getitems__(self, indices: list[int]) -> Any:
            return {"x": torch.tensor(indices)}

    quick = fast(DataLoader(Ready(int), batch_size=5, collate_fn=lambda batch: batch), **ways)
    assert [batch["x"].tolist() for batch in quick] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


def test_parts_that_are_normalized_in_different_ways(folder: Path) -> None:
    plain = v1.Compose([v1.Resize((24, 24)), v1.ToTensor()])
    both = ConcatDataset([ImageFolder(folder, EVALUATION), ImageFolder(folder, plain)])
    loader = DataLoader(both, batch_size=7)
    for (found, _), (expected, _) in zip(fast(loader, device="cpu"), loader, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_samples_that_a_data_set_keeps_are_not_written_to(folder: Path) -> None:
    kept: dict[int, Any] = {}

    def read(index: int) -> Any:
        if index not in kept:
            kept[index] = EVALUATION(opened(folder, index).convert("RGB"))[None]
        return kept[index][0]

    quick = fast(DataLoader(Reads(read), batch_size=5), threads=2)
    expected = []
    for images in quick:
        expected.append(images.clone())
        images.zero_()
    for images, first in zip(quick, expected, strict=True):
        assert torch.equal(images, first)


@pytest.mark.parametrize("spare", [None, SpareMemory()])
def test_memory_that_is_held(spare: SpareMemory | None, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def not_pinned(*args: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return empty(*args, **settings)

    monkeypatch.setattr(torch, "empty", not_pinned)
    memory = BatchMemory(2, spare, channels_last=True)
    images = [memory.slot(number, 0, torch.Size((3, 4, 5)), torch.float32) for number in range(2)]
    assert memory.is_held
    part = images[1][0].flip(0), images[1][0]
    images.clear()
    assert memory.is_held, "by a view of a view"
    del part
    assert not memory.is_held


def test_class_derived_from_compose_has_code_of_its_own(folder: Path) -> None:
    class Dimmed(v1.Compose):
        def __call__(self, image: Any) -> Any:
            return super().__call__(image) * torch.rand(())

    quick = fast(DataLoader(ImageFolder(folder, Dimmed(EVALUATION.transforms)), batch_size=3))
    assert "as they are: Dimmed; read by the training process" in quick.report()


@pytest.mark.parametrize("ways", WAYS)
def test_epoch_goes_on_behind_a_batch_that_failed(ways: dict[str, int]) -> None:
    def read(index: int) -> int:
        if index == 5:
            raise KeyError("five")
        return index

    batches, found = iter(fast(DataLoader(Reads(read), batch_size=2), **ways)), []
    while True:
        try:
            found.append(next(batches).tolist())
        except KeyError:
            found.append("failed")
        except StopIteration:
            break
    assert found == [[0, 1], [2, 3], "failed", [6, 7], [8, 9], [10, 11]]


def test_data_set_that_reads_another_loader(folder: Path) -> None:
    inner = fast(DataLoader(Reads(int), batch_size=2))  # in the thread that asks for it

    def read(index: int) -> Any:
        next(iter(inner))
        return type(opened(folder, index)).__name__

    assert next(iter(fast(DataLoader(Reads(read), batch_size=2), threads=1))) == ["LazyImage"] * 2


# ---------------------------------------------------------------- changed or watched transforms


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_transforms_that_change_within_an_epoch(folder: Path, is_own: bool, workers: int) -> None:
    """The next batch shows it, as it does without us; where workers read, the next epoch."""

    def changes(transform: Any) -> Iterator[None]:
        steps = transform.transforms
        steps[0].size = 20, 20
        yield
        steps[1].p = 1.0
        yield
        steps[0].size[1:] = [18]  # it is a list by now
        yield
        steps.append(v1.Lambda(lambda x: x + torch.rand(()) * 0 + 1))  # not known: it may draw
        yield
        steps[0] = v1.Resize((9, 8))
        yield

    def run(change: Callable[[Any], Any]) -> list[torch.Tensor]:
        resize = v1.Resize((24, 24))
        transform = v1.Compose([resize, v1.RandomHorizontalFlip(0.0), v1.ToTensor()])
        dataset: Any = ImageFolder(folder, transform)
        if is_own:
            dataset = Reads(lambda index: transform(opened(folder, index).convert("RGB")))
        torch.manual_seed(0)
        found = []
        change_next = changes(transform)
        for batch in change(DataLoader(dataset, batch_size=2, num_workers=workers)):
            found.append(batch if is_own else batch[0])
            resize.size = list(resize.size)
            next(change_next, None)
        return found

    expected = run(lambda loader: loader)
    for ours, theirs in zip(run(fast), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert len({images.shape for images in expected}) == (1 if workers else 4)


@pytest.mark.parametrize("place", ["member", "inside", "compose", "before", "method"])
def test_transforms_that_somebody_watches_run_themselves(folder: Path, place: str) -> None:
    flip = v2.RandomHorizontalFlip(1.0)
    resize = v2.Resize((20, 22))
    inner = v2.Compose([resize, v2.RandomApply([flip], p=1.0)])
    transform = v2.Compose([inner, v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    calls: list[Any] = []
    if place == "method":
        forward = resize.forward
        resize.forward = lambda image: calls.append(type(image)) or forward(image)  # type: ignore[method-assign]
    elif place == "before":
        resize.register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0].size))
    else:
        watched = {"member": resize, "inside": flip, "compose": inner}[place]
        watched.register_forward_hook(lambda module, inputs, output: calls.append(output.size))
    loader = DataLoader(ImageFolder(folder, transform), batch_size=12)
    counts = []
    for way in (loader, fast(loader)):
        calls.clear()
        counts.append((next(iter(way))[0], len(calls)))
    assert torch.equal(counts[0][0], counts[1][0])
    assert counts[0][1] == counts[1][1] == 12


def test_a_transform_that_keeps_its_tensor(folder: Path) -> None:
    kept: list[torch.Tensor] = []
    transform = v1.Compose([*EVALUATION.transforms, v1.Lambda(lambda x: kept.append(x) or x)])
    for images, _ in fast(DataLoader(ImageFolder(folder, transform), batch_size=4)):
        expected = images.clone()
        images.zero_()
        assert torch.equal(torch.stack(kept[-4:]), expected)


# ---------------------------------------------------------------- the report


@pytest.mark.parametrize("ways", WAYS)
def test_report_says_what_ran(folder: Path, ways: dict[str, int]) -> None:
    plain = v1.Compose([v1.Resize((8, 9)), v1.ToTensor()])
    paired = v2.Compose([v2.Resize((8, 9)), v2.ToImage()])

    def color(index: int) -> Image.Image:
        return opened(folder, index).convert("RGB")

    def path(index: int) -> Path:
        return sorted(folder.glob("*/*.jpg"))[index]

    reads: dict[str, Callable[[int], Any]] = {
        "two inputs": lambda index: paired(color(index), color(index)),
        "read by others": lambda index: simplejpeg.decode_jpeg(path(index).read_bytes()).shape,
        "pixels of PIL": lambda index: np.asarray(color(index)).shape,
        "an array": lambda index: plain(Image.fromarray(np.asarray(color(index)))),
        "ours": lambda index: plain(color(index)),
        "two views": lambda index: [plain(color(index)) for _ in "ab"],
    }
    found = {}
    for name, read in reads.items():
        quick = fast(DataLoader(Reads(read), batch_size=4), **ways)
        assert quick.report().startswith("to be taken over: reading, and each Compose")
        list(quick)
        found[name] = quick.report().partition("; the code of")[0]
    nothing = (
        "nothing was taken over in 12 samples: none of their images was opened by PIL and given, "
        "alone or with its mask, to a Compose of torchvision"
    )
    assert found == {
        "two inputs": f"{nothing}; as they are: Compose (12 times)",
        "read by others": nothing,
        "pixels of PIL": nothing,
        "an array": "taken over in 12 samples: Resize, ToTensor",
        "ours": "taken over in 12 samples: reading, Resize, ToTensor",
        "two views": (
            "taken over in 12 samples: reading (24 times), Resize (24 times), ToTensor (24 times)"
        ),
    }


def test_report_says_that_seeding_is_the_reason(folder: Path) -> None:
    plain = v1.Compose([v1.Resize((8, 9)), v1.ToTensor()])

    def read(index: int) -> torch.Tensor:
        torch.manual_seed(index)
        return plain(opened(folder, index).convert("RGB"))

    quick = fast(DataLoader(Reads(read), batch_size=4))
    list(quick)
    assert quick.report().startswith(
        "nothing was taken over in 12 samples: their code seeds a generator before a Compose, whose draws "
        "must follow from it; as they are: Compose (12 times); the code of"
    )


def test_report_of_a_compose_that_gets_two_images(folder: Path) -> None:
    """It is an attribute of the data set, so it is planned, and yet nothing of it runs here."""

    class Masks(ImageFolder):
        def __getitem__(self, index: int) -> Any:
            image = self.loader(self.samples[index][0])
            return self.transform(image, image)

    transform = v2.Compose([v2.Resize((8, 9)), v2.ToImage()])
    quick = fast(DataLoader(Masks(folder, transform), batch_size=4))
    list(quick)
    assert quick.report().startswith("nothing was taken over in 12 samples")
    assert "; as they are: Resize, ToImage, Compose (12 times)" in quick.report()


# ---------------------------------------------------------------- files


def test_names_of_files(folder: Path, tmp_path: Path) -> None:
    Image.new("RGB", (9, 9)).save(tmp_path / "x.png")
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    paths: list[Any] = [folder / "a" / "00.jpg", str(tmp_path / "x.png")]

    def named(index: int) -> Any:
        with open(paths[index], "rb") as file, Image.open(paths[index]) as image:  # noqa: PTH123
            return image.filename, Image.open(file).filename  # type: ignore[attr-defined]

    loader = DataLoader(Reads(named, 2), batch_size=2)
    assert list(fast(loader, threads=1)) == list(loader)
    bad = DataLoader(Reads(lambda _: Image.open(tmp_path / "bad.jpg"), 1))
    for ways in WAYS[:2]:
        with pytest.raises(OSError, match=r"cannot identify image file .*bad\.jpg"):
            list(fast(bad, **ways))


def test_limit_of_pixels_is_pils(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(ImageFolder(folder, EVALUATION), batch_size=12)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60 * 74)
    with pytest.warns(Image.DecompressionBombWarning, match="exceeds limit of 4440 pixels"):
        list(fast(loader, threads=1))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    with pytest.raises(Image.DecompressionBombError):
        list(fast(loader))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert len(list(fast(loader))) == 1


def test_drafts_and_thumbnails_are_pils(folder: Path) -> None:
    def small(index: int) -> Any:
        thumbnail, drafted, copied = (opened(folder, index) for _ in range(3))
        thumbnail.thumbnail((9, 9))
        drafted.draft("L", (30, 30))
        of_copy = copied.convert("RGB")
        of_copy.thumbnail((9, 9))
        return [np.asarray(image).tolist() for image in (thumbnail, drafted, of_copy, copied)]

    loader = DataLoader(Reads(small), batch_size=1, collate_fn=list)
    assert list(fast(loader, threads=1)) == list(loader)


# ---------------------------------------------------------------- the loader as an object


def _after_with(path: Path) -> Any:
    with Image.open(path) as image:
        pass
    return EVALUATION(image.convert("RGB"))


def _with_a_closed_stream(path: Path) -> Any:
    with path.open("rb") as file:
        image = Image.open(file)
    return EVALUATION(image)


def _verified(path: Path) -> Any:
    image = Image.open(path)
    image.verify()
    return EVALUATION(image)


def _at_another_frame(path: Path) -> Any:
    with Image.open(path) as image:
        image.seek(1)


def _converted_has_no_file(path: Path) -> Any:
    with Image.open(path).convert("RGB") as image:
        words = f"{sorted(map(str, image.info))}"
    image.verify()
    try:
        image.seek(1)
    except EOFError as error:
        words += f" {error}"
    return EVALUATION(image), words


def _classes(path: Path) -> Any:
    image = Image.open(path)
    converted = image.convert("RGB")
    classes = [image.__class__, converted.__class__, pickle.loads(pickle.dumps(image)).__class__]
    return f"{classes} {isinstance(image, PngImageFile)} {converted == Image.open(path).convert('RGB')}"


def _changed_and_pickled(path: Path) -> Any:
    image = Image.open(path)
    image.putpixel((0, 0), (1, 2, 3))
    return EVALUATION(pickle.loads(pickle.dumps(image))), EVALUATION(copy.deepcopy(image))


def _with_a_note(path: Path) -> Any:
    image = Image.open(path)
    image.info["note"] = "mine"
    return f"{sorted(map(str, image.convert('RGB').info))} {sorted(map(str, image.copy().info))}"


@pytest.mark.parametrize("suffix", ["jpg", "png"])
@pytest.mark.parametrize(
    "read",
    [
        _after_with,
        _with_a_closed_stream,
        _verified,
        _at_another_frame,
        _converted_has_no_file,
        _classes,
        _changed_and_pickled,
        _with_a_note,
    ],
)
def test_an_image_is_what_pil_gives(
    tmp_path: Path, read: Callable[[Path], Any], suffix: str
) -> None:
    """Also where its file is closed, where somebody asks for its class, or writes into it."""
    small = np.random.default_rng(0).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    path = tmp_path / f"image.{suffix}"
    Image.fromarray(small).resize((70, 60), Image.Resampling.BICUBIC).save(path)

    def outcome(index: int) -> Any:
        try:
            return read(path)
        except Exception as error:
            return f"{type(error).__name__} {error}"

    (plain,) = DataLoader(Reads(outcome, 1))
    (ours,) = fast(DataLoader(Reads(outcome, 1)))
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_settings_are_those_of_the_loader(folder: Path) -> None:
    quick = fast(DataLoader(ImageFolder(folder, EVALUATION), batch_size=5))
    quick.collate_fn = len
    assert quick.loader.collate_fn is len
    assert list(quick) == list(fast(quick.loader, workers=1)) == [5, 5, 2]
    by_worker = fast(quick.loader, workers=1)
    list(by_worker)
    by_worker.collate_fn = lambda samples: samples[0][1]
    assert list(by_worker) == [0, 0, 1]
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        quick.batch_size = 3


def test_copies_and_pickles(folder: Path) -> None:
    for settings in ({}, {"num_workers": 1, "persistent_workers": True}):
        loader: Any = DataLoader(ImageFolder(folder, TRAINING), batch_size=5, **settings)  # type: ignore[arg-type]
        quick = fast(loader, workers=len(settings) // 2, channels_last=True)
        expected = list(quick)
        for make in (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
            other: Any = make(quick)
            for (images, labels), (first, numbers) in zip(other, expected, strict=True):
                assert torch.equal(labels, numbers)
                assert images.stride() == first.stride()
            assert other.report() == quick.report()


def test_loader_that_iterates_in_its_own_way(folder: Path) -> None:
    class Doubled(DataLoader[Any]):
        def __iter__(self) -> Any:
            return ((2 * images, labels) for images, labels in super().__iter__())

    class Endless(DataLoader[Any]):
        """As timm's MultiEpochsDataLoader: one iterator of torch's over a batch sampler without an end."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            object.__setattr__(self, "batch_sampler", itertools.repeat([1, 2]))
            self.iterator = super().__iter__()

        def __iter__(self) -> Any:
            return (next(self.iterator) for _ in range(3))

    doubled = Doubled(ImageFolder(folder, EVALUATION), batch_size=4)
    quick = fast(doubled)
    assert quick.report() == "nothing is taken over: Doubled has an __iter__ of its own"
    for (images, _), (expected, _) in zip(quick, doubled, strict=True):
        assert torch.equal(images, expected)
    endless = fast(Endless(ImageFolder(folder, EVALUATION), batch_size=4))
    assert len(list(itertools.islice(endless, 9))) == 3


def test_loader_of_accelerate(folder: Path) -> None:
    """It reads `base_dataloader`, and adds what belongs to it: devices, and when an epoch ends."""

    class Prepared(DataLoader[Any]):
        def __init__(self, base: DataLoader[Any]) -> None:
            super().__init__(base.dataset)
            self.base_dataloader = base

        def __iter__(self) -> Any:
            return ((images, labels, "prepared") for images, labels in iter(self.base_dataloader))

        def __len__(self) -> int:
            return len(self.base_dataloader)

    base = DataLoader(ImageFolder(folder, EVALUATION), batch_size=5)
    prepared = Prepared(base)
    quick = fast(prepared)
    for one in (quick, copy.copy(quick)):
        assert one.report().endswith("ToTensor, Normalize; read by threads")
        assert len(one) == 3
        for (images, labels, word), (expected, numbers) in zip(one, base, strict=True):
            assert word == "prepared"
            assert torch.equal(labels, numbers)
            assert torch.equal(images, expected)
    assert prepared.base_dataloader is base
    # What divides a DataLoader among processes must take ours for one, or each reads everything.
    assert isinstance(quick, DataLoader)
    assert isinstance(fast(base), DataLoader)


def test_everything_is_pinned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Any] = []
    monkeypatch.setattr(fast_loader, "pin_memory", lambda batch: pinned.append(batch) or batch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    loader = DataLoader(
        ImageFolder(folder, EVALUATION), batch_size=6, pin_memory=True, collate_fn=list
    )
    for ways in ({}, {"threads": 1}):
        pinned.clear()
        assert len(list(fast(loader, **ways))) == len(pinned) == 2


def test_wrong_numbers_of_threads_and_workers() -> None:
    loader = DataLoader(Reads(int))
    for settings in ({"threads": "2"}, {"threads": 2.5}, {"workers": "2"}):
        with pytest.raises(InputError, match=r"(threads|workers) must be at least [01], got"):
            fast(loader, **settings)  # type: ignore[arg-type]
