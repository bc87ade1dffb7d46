"""Data of a user's own function: what it may return, what is said of the rest; threads, forks, identity."""

import functools
import io
import multiprocessing
import os
import pickle
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, random_split
from torchvision import datasets, transforms, tv_tensors
from torchvision.transforms import v2

from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.sources.open_data import open_parts, open_source, open_sources
from flambeau.data.sources.source import hold_out
from flambeau.data.sources.user_function import open_function
from flambeau.data.sources.user_samples import stored_image
from flambeau.errors import DecodeError, InputError
from flambeau.images.decode import decode

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (12, 9, 7, 3), dtype=np.uint8)  # numbers, H, W, C


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "given", GIVEN)
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("flambeau_data_"):
            del sys.modules[name]


class Pairs(Dataset):
    """Arrays with labels 0, 1, 2, 0, 1, 2 ... in .targets."""

    def __init__(self, length=12):
        self.targets = [index % 3 for index in range(length)]

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return PIXELS[index], self.targets[index]


GIVEN = types.ModuleType("given")  # to the function in the file


def opened(returned):
    """Train and validation source of a function that returns this, or what this function returns."""
    GIVEN.make = returned if callable(returned) else lambda: returned
    Path("data.py").write_text("import given\nload = given.make\n")
    return open_function("data.py:load")


def complaint(returned):
    with pytest.raises(InputError) as caught:
        opened(returned)
    message = str(caught.value)
    assert message.startswith(str(Path("data.py").absolute()))
    assert len(message.splitlines()) <= 2
    return message


def as_file(pixels, kind="png", **options):
    target = io.BytesIO()
    Image.fromarray(pixels).save(target, kind, **options)
    return target.getvalue()


# ---------------------------------------------------------------- what it may return


def test_every_kind_of_image_gives_the_pixels_of_the_file():
    Path("seven.png").write_bytes(as_file(PIXELS[7]))
    chw = torch.from_numpy(PIXELS[7]).permute(2, 0, 1)
    kinds = [
        as_file(PIXELS[7]), bytearray(as_file(PIXELS[7])), memoryview(as_file(PIXELS[7])),
        "seven.png", Path("seven.png"), b"seven.png".decode(),
        np.fromfile("seven.png", np.uint8), torch.from_numpy(np.fromfile("seven.png", np.uint8)),
        Image.open("seven.png"), Image.fromarray(PIXELS[7]), PIXELS[7], np.asfortranarray(PIXELS[7]),
        chw, chw.contiguous(), tv_tensors.Image(chw),
    ]  # fmt: skip
    source, val = opened([(image, index % 2) for index, image in enumerate(kinds)])
    assert val is None
    for index in range(len(kinds)):
        np.testing.assert_array_equal(decode(source.read(index), channels=3), PIXELS[7])
    grey = [PIXELS[0, :, :, 0], PIXELS[0, :, :, :1], torch.from_numpy(PIXELS[0, :, :, 0])]
    for image in [*grey, torch.from_numpy(PIXELS[0, :, :, :1]).permute(2, 0, 1)]:
        found = decode(stored_image(image), channels=1)
        np.testing.assert_array_equal(found[:, :, 0], PIXELS[0, :, :, 0])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "YCbCr"])
def test_a_pil_image_is_what_its_file_is(mode):
    """Against the decoder of files, which has its own tests."""
    if mode.startswith("I"):
        wide = RNG.integers(0, 65536, (9, 7)).astype(np.uint16)
        image = Image.fromarray(wide if mode == "I;16" else wide.astype(np.int32))
    else:
        noise = Image.fromarray(RNG.integers(0, 256, (9, 7, 4), dtype=np.uint8), "RGBA")
        image = (
            noise.convert("RGB").convert(mode) if mode in ("YCbCr", "CMYK") else noise.convert(mode)
        )
    target = io.BytesIO()
    image.save(target, "tiff" if mode in ("CMYK", "YCbCr", "I") else "png")
    expected = decode(target.getvalue(), channels=3)
    np.testing.assert_array_equal(decode(stored_image(image), channels=3), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_pil_image_is_turned_upright_once(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    with Image.open(io.BytesIO(as_file(PIXELS[0], exif=exif))) as image:
        upright = np.asarray(ImageOps.exif_transpose(image))
        np.testing.assert_array_equal(stored_image(image), upright)
        np.testing.assert_array_equal(stored_image(image.convert("RGB")), upright)
        np.testing.assert_array_equal(stored_image(ImageOps.exif_transpose(image)), upright)


def test_labels_and_class_names_of_torchvisions_image_folder():
    for index in range(6):
        path = Path("photos", "abc"[index % 3], f"{index}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_file(PIXELS[index]))
    folder = datasets.ImageFolder("photos")
    source, _ = opened(lambda: folder)
    assert source.classes == ("a", "b", "c")
    assert source.labels.tolist() == folder.targets == [0, 0, 1, 1, 2, 2]
    for index, (image, _) in enumerate(folder):
        np.testing.assert_array_equal(source.read(index), np.asarray(image))


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([0, 1, 2] * 4, ("0", "1", "2")),
        (torch.tensor([0, 1, 2] * 4), ("0", "1", "2")),
        (np.array([[0], [1], [2]] * 4), ("0", "1", "2")),
        (("cat", "ant", "bee") * 4, ("ant", "bee", "cat")),
        (np.array(["cat", "ant", "bee"] * 4), ("ant", "bee", "cat")),
        ([np.int64(3), torch.tensor(1), True] * 4, ("0", "1", "2", "3")),
    ],
)
@pytest.mark.parametrize("name", ["targets", "labels", None])
def test_labels_are_known_beforehand_or_read_from_the_samples(labels, classes, name, capsys):
    class Labelled:
        def __len__(self):
            return 12

        def __getitem__(self, index):
            return PIXELS[index], labels[index]

    if name:
        setattr(Labelled, name, labels)
    source, _ = opened(Labelled())
    plain = [getattr(label, "item", lambda label=label: label)() for label in labels]
    names = [label if isinstance(label, str) else str(int(label)) for label in plain]
    assert [source.classes[label] for label in source.labels] == names
    assert source.classes == classes
    message = "reading all 12 samples for their labels"
    assert (message in capsys.readouterr().err) == (name is None)


def test_class_names_of_the_data_set_are_the_order_of_the_classes():
    class Named(Pairs):
        classes = (["zebra", "equus"], "ant", "bee")  # the first as ImageNet has it

    source, _ = opened(Named())
    assert source.classes == ("zebra, equus", "ant", "bee")
    data = Named()
    data.targets = ["bee", "ant"] * 6
    assert opened(data)[0].labels.tolist() == [2, 1] * 6
    Path("data.classes.txt").write_text("one\ntwo\nthree\n")  # as beside any other data
    assert opened(Pairs())[0].classes == ("one", "two", "three")


def test_parts_and_sums_of_data_sets_know_their_labels(capsys):
    class Named(Pairs):
        classes = ("x", "y", "z")
        thread_safe = True

    train, val = opened(lambda: random_split(Named(), [8, 4], torch.Generator().manual_seed(0)))
    assert (len(train), len(val)) == (8, 4)
    both = ConcatDataset([Subset(Named(), [4, 2]), Named(3)])
    source, _ = opened(lambda: both)
    assert source.labels.tolist() == [1, 2, 0, 1, 2]
    np.testing.assert_array_equal(source.read(1), PIXELS[2])
    for one in (train, val, source):
        assert one.classes == ("x", "y", "z")
        assert one._thread_safe
    assert capsys.readouterr().err == ""
    strange = Named()
    strange.classes = ("x", "z", "y")
    assert "different .classes" in complaint(ConcatDataset([Named(), strange]))


class Stored:
    """A source as flambeau.data.sources.source has it."""

    classes, labels, names = ("a", "b"), torch.tensor([1, 0, 1]), ("p", "q", "r")

    def __len__(self):
        return 3

    def read(self, index):
        return PIXELS[index]


def test_an_object_with_the_methods_of_a_source():
    source, _ = opened(Stored())
    assert (source.classes, source.labels.tolist()) == (("a", "b"), [1, 0, 1])
    assert source.names == ["p", "q", "r"]
    assert source.describe(1).endswith("data.py:load, sample 1 (q)")
    np.testing.assert_array_equal(source.read(2), PIXELS[2])
    short = Stored()
    short.labels = torch.tensor([1, 0])
    assert ".labels are not one for each of the 3 samples" in complaint(short)


def test_a_pair_is_what_to_train_on_and_what_to_validate_on():
    opened((Pairs(12), Pairs(6)))
    train, val = open_sources(Path("data.py:load"))
    assert (len(train), len(val)) == (12, 6)
    assert len(open_source(Path("data.py:load"), ("0", "1", "2"))) == 6
    assert val.describe(3).endswith("data.py:load, validation sample 3")
    opened((Pairs(), None))
    train, val = open_sources(Path("data.py:load"), holdout=0.5)
    assert (len(train), len(val)) == (6, 6)


def test_images_are_batches_as_from_a_folder(photos):
    files = sorted(photos.rglob("*.jpg"))

    class Files:
        targets = tuple(path.parent.name for path in files)

        def __len__(self):
            return len(files)

        def __getitem__(self, index):
            return files[index].read_bytes(), self.targets[index]

    opened(Files())
    batches = []
    for data in (photos, Path("data.py:load")):
        dataset = ImageDataset(open_parts(data)[0], image_size=32, channels=3, train=True)
        batches.append(dataset.batch(torch.arange(len(files)), torch.arange(len(files)))[0])
    torch.testing.assert_close(batches[0], batches[1], rtol=0, atol=0)


# ---------------------------------------------------------------- what is refused


class Endless(IterableDataset):
    def __iter__(self):
        yield from range(3)


class Lengthless(Dataset):
    pass


@pytest.mark.parametrize(
    ("returned", "parts"),
    [
        (None, ("has returned None", "Return a data set with len() and [index], or a pair")),
        ("photos", ("has returned str",)),
        ({"train": 1, "test": 2}, ("has returned a dict with train, test", "or a pair of them")),
        (iter([]), ("has returned list_iterator, which has no len()",)),
        (Endless(), ("has returned Endless, which has no len()",)),
        (Lengthless(), ("has returned Lengthless, which has no len()",)),
        ({1, 2}, ("has returned a set, which has no [index]".replace("a set", "set"),)),
        ([], ("has returned a list without any sample",)),
        ((Pairs(), Pairs(), Pairs()), ("has returned 3 things", "or a pair")),
        ((Pairs(), 3), ("has returned int, which has no len()",)),
    ],
)
def test_what_is_no_data_set(returned, parts):
    message = complaint(lambda: returned)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_floats_that_to_tensor_makes_are_the_pixels_they_were_made_of(dtype):
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16)
    floats = (levels.to(torch.float32) / 255).to(dtype)
    for image in (floats, floats[0], floats[0].numpy(), floats.permute(1, 2, 0).numpy()):
        found = decode(stored_image(image), channels=1)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found[:, :, 0], levels[0])

    steps = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    for transform in (transforms.ToTensor(), v2.Compose(steps)):
        source, _ = opened([(transform(Image.fromarray(image)), 0) for image in PIXELS])
        for index in range(len(PIXELS)):
            np.testing.assert_array_equal(source.read(index), PIXELS[index])


def test_a_later_sample_that_was_normalized_stops_with_its_number():
    images = [torch.zeros(3, 9, 7) for _ in range(99)]
    images[50] = transforms.Normalize((0.5,) * 3, (0.2,) * 3)(images[50])
    source, _ = opened([(image, 0) for image in images])  # samples 0, 12, 24 ... are looked at here
    with pytest.raises(
        InputError, match=r"sample 50: .* -2\.5 \.\. -2\.5 are not all k / 255, as "
    ) as caught:
        source.read(50)
    assert "float_pixels = True" in str(caught.value)


def sample(image, label=0):
    return [(image, label), (PIXELS[0], 1)]


RAW = "Return images as they are stored, without Normalize and random transforms"
DTYPES = "Return pixels of uint8, uint16, float16, float32 or float64, "
FIRST = "data.py:load, sample 0: "


@pytest.mark.parametrize(
    ("returned", "parts"),
    [
        (sample(torch.full((3, 9, 7), torch.nan)), ("nan .. nan are not all k / 255", RAW)),
        (
            sample(torch.zeros(3, 9, 7).bfloat16()),
            ("its image is a bfloat16 tensor", DTYPES, "image.float()"),
        ),
        (sample(torch.zeros(3, 9, 7, dtype=torch.int64)), ("its image is a int64 tensor", DTYPES)),
        ([(torch.rand(9, 7, 3), 0)], ("float32 tensor of shape (9, 7, 3)", "(C, H, W)")),
        (sample(torch.zeros(9, 7, 3)), ("tensor of shape (9, 7, 3)", "(C, H, W)")),
        (sample(np.zeros((9, 7), bool)), ("its image is a bool array", DTYPES)),
        (sample(Image.new("F", (7, 9))), ("of floating-point pixels", "np.asarray(image)")),
        (sample(PIXELS[0].transpose(2, 0, 1)), ("array of shape (3, 9, 7)", "(H, W[, C])")),
        (sample(torch.from_numpy(PIXELS[0])), ("tensor of shape (9, 7, 3)", "(C, H, W)")),
        (sample(torch.zeros(1, 3, 9, 7, dtype=torch.uint8)), ("(1, 3, 9, 7)",)),
        (sample(None), ("its image is None", "where an image cannot be read, raise an OSError")),
        (
            sample(io.BytesIO()),
            ("its image is of type BytesIO", "Return the bytes of an image file", "or float64"),
        ),
        (sample(PIXELS[0], None), ("its label is None",)),
        (sample(PIXELS[0], -1), ("label -1",)),
        ([{"image": PIXELS[0], "label": 0}], ("a dict with image, label", "row['image']")),
        ([{"pixels": PIXELS[0]}], ("a dict with pixels\nReturn the pair (image, label)",)),
        ([(PIXELS[0], 0, "0.png")], ("it is a tuple of 3\nReturn the pair (image, label)",)),
        (["0.png"], ("it is of type str\nReturn the pair (image, label)",)),
        (PIXELS, ("it is a uint8 array of shape (9, 7, 3)", "list(zip(images, labels))")),
    ],
)
def test_samples_that_do_not_do(returned, parts):
    message = complaint(lambda: returned)
    assert all(part in message for part in (FIRST, *parts)), message


@pytest.mark.parametrize(
    "image", [torch.full((3, 9, 7), -0.5), np.full((9, 7), 0.5), PIXELS[0].astype(np.float32)]
)
def test_floating_point_pixels_beside_others_are_refused(image):
    message = complaint(lambda: sample(image))
    assert "data.py:load, sample 1: its image is a uint8 array of shape (9, 7, 3)" in message
    assert message.endswith("others have floating-point pixels\nReturn the same type for all")


def test_arrays_of_images_and_labels_are_no_pair_of_data_sets():
    message = complaint((PIXELS, np.arange(12)))
    assert "training sample 0: it is a uint8 array" in message
    assert message.endswith("Return the pair (image, label); of arrays, list(zip(images, labels))")


def test_numbers_and_words_are_not_mixed():
    message = complaint([(PIXELS[0], 0), (PIXELS[1], "b")])
    assert "sample 1: its label is 'b', that of sample 0 0" in message


@pytest.mark.parametrize(
    ("classes", "part"),
    [
        (("a", "b"), "label 2 is none of the 2 classes that "),
        (("a", "b", "a"), ".classes names class 'a' twice; a class has one name of its own"),
    ],
)
def test_class_names_that_do_not_fit(classes, part):
    data = Pairs()
    data.classes = classes
    assert part in complaint(data)


def test_labels_beside_the_samples_have_to_be_theirs():
    class Shifted(Pairs):
        def __getitem__(self, index):
            return PIXELS[index], (self.targets[index] + 1) % 3

    assert "sample 0: its label is 1, and in .targets or .labels it is '0' (class 0)" in complaint(
        Shifted()
    )

    class Later(Pairs):
        def __getitem__(self, index):
            return PIXELS[index], 2 if index == 2 or self.is_late else self.targets[index]

    data = Later()
    data.is_late = False
    source, _ = opened(data)
    data.is_late = True
    with pytest.raises(
        InputError, match=r"sample 4: its label is 2, and in .targets or .labels it is '1'"
    ):
        source.read(4)


def test_random_transforms_are_refused():
    class Augmented(Pairs):
        def __getitem__(self, index):
            return torch.randint(0, 256, (3, 9, 7), dtype=torch.uint8), self.targets[index]

    message = complaint(Augmented())
    assert "sample 0: its image is another one each time that it is read" in message
    assert "Leave random transforms out" in message


# ---------------------------------------------------------------- errors of the user's code


def written(text):
    Path("own.py").write_text(text)
    return "own.py:load"


OWN = """
class Data:
    targets = [0, 1] * 50
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if index == 94:
            raise {error}
        return bytes.fromhex("5035203120312032353520" "41"), index % 2
def load():
    return Data()
"""


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("def f():\n    1 // 0\n\ndef load():\n    f()", "own.py, line 2: ZeroDivisionError"),
        ("def load(:", "own.py: SyntaxError: invalid syntax (own.py, line 1)"),
        ("import numpy\nimport no_such_module", "own.py, line 2: ModuleNotFoundError"),
        ("\ndef load():\n    raise KeyError('bucket')", "own.py, line 3: KeyError: 'bucket'"),
        ("def load(root): pass", "own.py:load asks for 'root'; it is called without arguments"),
        ("def lood(): pass", "own.py has no function 'load'; DATA FILE.py:FUNCTION"),
        ("load = 3", "own.py has no function 'load'"),
        (
            "class load:\n    __getitem__ = 1\n    def __len__(self):\n        return 1 // 0",
            "own.py, line 4: ZeroDivisionError",
        ),
    ],
)
def test_errors_of_the_file_name_its_line(text, part):
    with pytest.raises(InputError) as caught:
        open_function(written(text))
    assert part in str(caught.value)


@pytest.mark.parametrize("text", ["import beside", "from package.data import x"])
def test_a_module_beside_the_file_is_not_found_but_named(text):
    Path("beside.py").touch()
    Path("package").mkdir()
    with pytest.raises(InputError, match=r"line 1: ModuleNotFoundError.*\nIt lies beside the file"):
        open_function(written(text))


def test_no_such_file():
    with pytest.raises(InputError, match=r"DATA: .*gone\.py is not a file"):
        open_parts(Path("gone.py:load"))


@pytest.mark.parametrize(
    ("error", "kind", "part"),
    [
        ("KeyError('x')", InputError, "own.py:load, sample 94, line 8: KeyError: 'x'"),
        ("TimeoutError('slow')", InputError, "own.py:load, sample 94, line 8: TimeoutError: slow"),
        (
            "FileNotFoundError(2, 'No such file', 'B/9.JPG')",
            DecodeError,
            "no such file: B/9.JPG (line 8)",
        ),
        ("OSError('cut short')", DecodeError, "cut short (line 8)"),
        ("SyntaxError('broken PNG file')", DecodeError, "broken PNG file (line 8)"),
    ],
)
def test_errors_of_a_sample_name_it_and_bad_images_can_be_left_out(error, kind, part):
    source, _ = open_function(written(OWN.format(error=error)))
    with pytest.raises(kind) as caught:
        source.read(94)
    assert part in str(caught.value)
    dataset = ImageDataset(source, image_size=8, channels=1, train=False, skip_bad=True)
    if kind is DecodeError:
        (_, targets), bad = dataset.batch(torch.tensor([93, 94, 95]), torch.zeros(3))
        assert (targets.tolist(), bad) == ([1, 1], [94])
        return
    with pytest.raises(InputError, match="sample 94"):
        dataset.batch(torch.tensor([94]), torch.zeros(1))


def test_a_path_that_is_not_there_is_a_bad_image():
    data = Pairs()
    source, _ = opened([("GONE.png" if k == 5 else PIXELS[k], data.targets[k]) for k in range(12)])
    with pytest.raises(DecodeError, match=r"no such file or directory: GONE\.png$"):
        source.read(5)


def test_an_image_that_cannot_be_read_has_no_label():
    text = OWN.format(error="OSError('cut short')").replace("targets =", "others =")
    with pytest.raises(
        InputError, match=r"sample 94: cut short \(line 8\)\nIts label is not known"
    ):
        open_function(written(text))


# ---------------------------------------------------------------- threads and processes


class Counting(Pairs):
    """How many threads are in [index] at once, at most."""

    def __init__(self, length=12, counter=None):
        super().__init__(length)
        self.counter = counter or {"now": 0, "most": 0}

    def __getitem__(self, index):
        self.counter["now"] += 1
        self.counter["most"] = max(self.counter["most"], self.counter["now"])
        time.sleep(0.002)
        self.counter["now"] -= 1
        return super().__getitem__(index)


def read_in_threads(*sources):
    threads = [
        threading.Thread(target=functools.partial(source.read, index))
        for source in sources
        for index in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("thread_safe", [False, True])
def test_one_thread_at_a_time_unless_the_data_set_says_otherwise(thread_safe):
    train = Counting()
    val = Counting(6, train.counter)  # perhaps of the same open file
    train.thread_safe = val.thread_safe = thread_safe
    read_in_threads(*opened((train, val)))
    assert (train.counter["most"] > 1) == thread_safe


def test_a_file_that_a_sample_names_is_read_outside_the_lock(monkeypatch):
    Path("0.png").write_bytes(as_file(PIXELS[0]))
    source, _ = opened([("0.png", k % 2) for k in range(6)])
    barrier = threading.Barrier(2, timeout=300)
    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: [barrier.wait(), original(path)][1])
    threads = [threading.Thread(target=source.read, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not barrier.broken


class Opened(Pairs):
    """Where it was made."""

    def __init__(self):
        super().__init__()
        self.pid = os.getpid()

    def __getitem__(self, index):
        return np.full((4, 4), self.pid % 251, np.uint8), self.targets[index]


class OpenedOnce(Opened):
    fork_safe = True


def in_fork(source, index):
    """Whether a fork reads from an object of its own; the lock is held by a thread that it does not have."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")

    def child():
        pixels = source.read(index)
        sender.send((int(pixels[0, 0]), os.getpid() % 251))

    with source._returned.lock:
        process = context.Process(target=child, daemon=True)  # killed where it stands still
        process.start()
    assert receiver.poll(60), "the fork stands still"
    process.join()
    return receiver.recv()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("kind", [Opened, OpenedOnce])
def test_a_fork_calls_the_function_again_unless_the_data_set_says_otherwise(kind):
    source, _ = opened(kind)
    maker, child = in_fork(source, 3)
    assert maker == (child if kind is Opened else os.getpid() % 251)


def test_another_process_gets_the_function_and_not_what_it_returned():
    made = []

    def load():
        made.append(Pairs())
        made[-1].unpicklable = threading.Lock()
        return made[-1], Pairs(6)

    train, val = opened(load)
    here = pickle.loads(pickle.dumps((train, val)))
    assert len(made) == 1
    for one, other in zip((train, val), here, strict=True):
        np.testing.assert_array_equal(one.read(4), other.read(4))
        assert (one.fingerprint, one.classes) == (other.fingerprint, other.classes)
    assert len(made) == 2


def test_a_function_that_returns_something_else_elsewhere():
    lengths = [12, 9]
    source, _ = opened(lambda: Pairs(lengths.pop(0)))
    with pytest.raises(InputError, match="has returned 12 samples, and 9 in another process"):
        pickle.loads(pickle.dumps(source)).read(0)


def test_a_file_that_is_edited_during_a_run_stays_what_it_was():
    source, _ = open_function(written(OWN.format(error="OSError")))
    Path("own.py").write_text("def load(:")
    there = pickle.loads(pickle.dumps(source))
    assert there.read(7) == source.read(7)


def test_one_open_file_is_right_in_threads():
    """The place in it is moved by everybody who reads."""
    Path("pixels").write_bytes(PIXELS.tobytes())

    class InFile(Pairs):
        def __init__(self):
            super().__init__()
            self.file = Path("pixels").open("rb")  # noqa: SIM115 - open as long as the data set

        def __getitem__(self, index):
            self.file.seek(index * PIXELS[0].size)
            time.sleep(0.001)
            pixels = np.frombuffer(self.file.read(PIXELS[0].size), np.uint8)
            return pixels.reshape(PIXELS[0].shape), self.targets[index]

    source, _ = opened(InFile)
    dataset = ImageDataset(source, image_size=8, channels=3, train=False, threads=4)
    images, _ = dataset.batch(torch.arange(12), torch.zeros(12))[0]
    alone = ImageDataset(source, image_size=8, channels=3, train=False, threads=1)
    torch.testing.assert_close(images, alone.batch(torch.arange(12), torch.zeros(12))[0][0])
    found = [source.read(index) for index in range(12)]
    np.testing.assert_array_equal(found, PIXELS)
    source._returned.part(0).file.close()


# ---------------------------------------------------------------- identity


def test_what_the_fingerprint_tells_apart():
    def of(data, part=0):
        return opened(lambda: data)[part].fingerprint

    same = of(Pairs())
    assert of(Pairs()) == same
    others = [Pairs(9), Pairs(), Pairs(), Pairs()]
    others[1].targets[4] = 0
    others[2].classes = ("a", "b", "c")
    others[3].fingerprint = "version 2"
    prints = [same, *map(of, others), of((Pairs(), Pairs())), of((Pairs(), Pairs()), part=1)]
    assert len(set(prints)) == len(prints)
    darker = Pairs()
    darker.__class__ = type(
        "Darker", (Pairs,), {"__getitem__": lambda s, k: (PIXELS[k] // 2, k % 3)}
    )
    assert of(darker) == same  # the pixels are not looked at


def test_the_fingerprint_is_that_of_a_moved_file():
    prints = []
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "own.py").write_text(OWN.format(error="OSError"))
        prints.append(open_function(f"{folder}/own.py:load")[0].fingerprint)
    assert prints[0] == prints[1]


def test_what_is_held_out_does_not_depend_on_labels_of_others():
    source, _ = opened(Pairs())
    longer, _ = opened(Pairs(12))
    assert list(source.names)[:2] == ["00000000", "00000001"]
    held = [hold_out(one, share=0.3, seed=0)[1].names for one in (source, longer)]
    assert held[0] == held[1]


# ---------------------------------------------------------------- what the file does beside


SPLIT = """
import os
import random
import sys
import numpy as np
from torch.utils.data import Dataset, random_split

print("the file")

class Images(Dataset):
    targets = [number % 3 for number in range(60)]
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return np.full((4, 4, 3), index, np.uint8), self.targets[index]

def split():
    print("the function")
    os.chdir("/")
    random.shuffle([1, 2])
    return random_split(Images(), [40, 20])

def ends():
    sys.exit(0)

class Alone(Images):
    targets = None
    def __getitem__(self, index):
        return np.full((4, 4, 3), index, np.uint8)

class WithNone(Alone):
    def __getitem__(self, index):
        return super().__getitem__(index), None
"""


def test_a_random_split_is_the_same_each_time_and_draws_from_nobody(capsys):
    path = written(SPLIT).removesuffix(":load")
    folder, state = Path.cwd(), torch.get_rng_state()
    train, val = open_function(f"{path}:split")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    again, _ = open_function(f"{path}:split")
    assert train.fingerprint == again.fingerprint
    seen = [int(source.read(k)[0, 0, 0]) for source in (train, val) for k in range(len(source))]
    assert sorted(seen) == list(range(60)) != seen
    assert seen[:40] == [int(again.read(k)[0, 0, 0]) for k in range(40)]
    # Results alone go to standard output, and are where they were asked for.
    assert Path.cwd() == folder
    output = capsys.readouterr()
    assert (output.out, output.err.count("the function")) == ("", 2)


def test_a_file_that_ends_the_program_is_an_error():
    with pytest.raises(InputError, match=r"line \d+: SystemExit: 0"):
        open_function(f"{written(SPLIT).removesuffix(':load')}:ends")


@pytest.mark.parametrize("name", ["Alone", "WithNone"])
def test_images_without_labels_are_for_prediction(name):
    path = written(SPLIT).removesuffix(":load")
    with pytest.raises(InputError, match="label"):
        open_function(f"{path}:{name}")
    source, _ = open_function(f"{path}:{name}", labelled=False)
    assert source.classes == ("",) and source.labels.tolist() == [0] * 60
    assert int(source.read(7)[0, 0, 0]) == 7
