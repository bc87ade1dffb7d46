"""`flambeau predict` on everything that images come in: the same answers, and the same way out of trouble."""

import contextlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

import flambeau.data.sources.open_data as sources
from flambeau.cli.command import main
from flambeau.data.sources.folder import FileSet
from flambeau.data.sources.torchvision_sets import PixelSet
from flambeau.errors import InputError
from flambeau.recipes.data.lmdb_records import LMDBWriter
from flambeau.recipes.data.recordio import IRHeader, RecordWriter, pack
from flambeau.recipes.data.tf_example import build_example
from flambeau.recipes.data.tfrecord import TFRecordWriter
from flambeau.trainer.prediction.classify_files import predict
from flambeau.trainer.prediction.trained_model import load_trained
from refused import refused

PACKED = ("x.rec", "x.tfrecord", "x.tar", "x.lmdb", "x.h5", "x.npz", "x.npy", "x.pth")


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained_run(
    tmp_path_factory: pytest.TempPathFactory,
    kept_process: Callable[[], contextlib.AbstractContextManager[None]],
) -> Path:
    """A finished run that knows classes a and b."""
    root = tmp_path_factory.mktemp("predict")
    generator = np.random.default_rng(3)
    for label, name in enumerate("ab"):
        (root / "images" / name).mkdir(parents=True)
        for index in range(10):
            pixels = generator.integers(60 * label, 60 * label + 190, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "images" / name / f"{index}.png")
    command = f"train {root}/images --out {root}/run --duration 4st --batch-size 4 --precision fp32"
    with kept_process():
        assert main(command.split()) == 0
    return root / "run"


@pytest.fixture
def rows(flambeau: Any, trained_run: Path) -> Callable[..., list[dict[str, Any]]]:
    """Call predict and read its lines."""

    def call(*words: str | Path) -> list[dict[str, Any]]:
        answer = flambeau("predict", trained_run, *words, "--json")
        assert (answer.code, answer.err) == (0, "")
        return [json.loads(line) for line in answer.out.splitlines()]

    return call


def classes(rows: Sequence[dict[str, Any]]) -> list[Any]:
    return [row["classes"] for row in rows]


# ---------------------------------------------------------------- the same images in different clothes


def test_the_same_images_get_the_same_answer_to_the_bit(
    flambeau: Any, rows: Any, images: Path
) -> None:
    paths = sorted((images / "val").rglob("*.png"))
    files = rows(*paths)
    labels = [path.parent.name for path in paths]
    names = [f"{path.parent.name}/{path.name}" for path in paths]
    assert list(files[0]) == ["image", "classes"]
    assert [row["image"] for row in files] == list(map(str, paths))

    for workers in ("0", "2"):
        folder = rows(images / "val", "--workers", workers)
        assert classes(folder) == classes(files)
        assert [row["image"] for row in folder] == list(map(str, paths))
        assert [row["label"] for row in folder] == labels

    Path("list.csv").write_text("path\n" + "".join(f"images/val/{name}\n" for name in names))
    listed = rows("list.csv")
    assert classes(listed) == classes(files)
    assert [row["name"] for row in listed] == [f"images/val/{name}" for name in names]
    assert "label" not in listed[0]

    for name in PACKED:
        assert flambeau("pack images/val", name).code == 0
        packed = rows(name)
        assert classes(packed) == classes(files), name
        assert [row["label"] for row in packed] == labels
        assert [(row["source"], row["index"]) for row in packed] == [(name, k) for k in range(8)]
        assert name in packed[3]["image"]
        assert list(packed[0]) == ["image", "source", "index", "name", "label", "classes"]
    assert [row["name"] for row in rows("x.lmdb")] == names


def without_labels(paths: Sequence[Path]) -> list[str]:
    """Files of every format that hold these images and no usable label."""
    files = [path.read_bytes() for path in paths]
    pixels = np.stack([np.array(Image.open(path)) for path in paths])
    with tarfile.open("u.tar", "w") as tar:
        for number, path in enumerate(paths):
            tar.add(path, f"{number}.png")
    with RecordWriter("u.rec") as records:  # of a task with several labels
        for number, data in enumerate(files):
            header = IRHeader(0, torch.tensor([0.5, 3.0]), number, 0)
            records.write(pack(header, data), key=number)
    with TFRecordWriter("u.tfrecord") as tfrecords:
        for number, data in enumerate(files):
            tfrecords.write(build_example({"image": data, "image_id": b"%d" % number}))
    with LMDBWriter("u.lmdb") as values:
        for number, data in enumerate(files):
            values.write(str(number), data)
    Path("npy").mkdir()
    np.save("npy/u.npy", pixels)
    np.savez("u.npz", test_images=pixels)
    torch.save(torch.from_numpy(pixels), "u.pth")
    with h5py.File("u.h5", "w") as file:
        file["images"] = pixels
    return ["u.tar", "u.rec", "u.tfrecord", "u.lmdb", "npy/u.npy", "npy", "u.npz", "u.pth", "u.h5"]


def test_packed_images_need_no_labels(
    flambeau: Any, rows: Any, trained_run: Path, images: Path
) -> None:
    paths = sorted((images / "val").rglob("*.png"))
    expected = classes(rows(*paths))
    for name in without_labels(paths):
        answer = flambeau("predict", trained_run, name, "--json")
        assert answer.code == 0, answer.err
        found = [json.loads(line) for line in answer.out.splitlines()]
        assert classes(found) == expected, name
        assert list(found[0]) == ["image", "source", "index", "name", "classes"]
        assert answer.err.startswith(f"{name} is read without labels: ")
        assert len(answer.err.splitlines()) == 1
        assert flambeau("evaluate", trained_run, name).code == 2


def test_shards_by_their_folder_and_by_the_name_of_the_whole(
    flambeau: Any, rows: Any, images: Path
) -> None:
    expected = {f"{row['label']}/{Path(row['image']).stem}": row for row in rows(images / "val")}
    Path("packed").mkdir()
    assert flambeau("pack images/val packed/x.tar --shards 3").code == 0
    Path("packed/README.md").touch()
    for what in ("packed", "packed/x.tar"):
        found = {row["name"].partition("/")[2]: row["classes"] for row in rows(what)}  # SHARD/KEY
        assert found == {name: row["classes"] for name, row in expected.items()}
    assert [row["index"] for row in rows("packed/x.tar")] == list(range(8))


def test_the_accuracy_is_that_of_evaluate(
    flambeau: Any, trained_run: Path, rows: Any, make_images: Any, monkeypatch: Any
) -> None:
    """70 images are two batches of different size; 9 lie in the wrong folder."""
    data = make_images(Path("many"), per_class=35, seed=8)
    for index in range(9):
        (data / "a" / f"0{index}.png").rename(data / "b" / f"wrong{index}.png")
    paths = sorted(data.rglob("*.png"))
    pixels = np.stack([np.array(Image.open(path)) for path in paths])
    twins = PixelSet("twins", pixels, ["ab".index(path.parent.name) for path in paths], ["a", "b"])
    monkeypatch.setattr(sources, "open_named", lambda *_, **__: (None, twins))
    expected = json.loads(flambeau("evaluate", trained_run, data, "--json").out)
    assert (expected["images"], expected["accuracy"] < 1) == (70, True)
    for what in ("many", "torchvision:twins"):
        found = rows(what)
        right = [row["classes"][0]["class"] == row["label"] for row in found]
        assert len(right) == 70
        assert np.mean(right) == pytest.approx(expected["accuracy"], abs=1e-7)
    assert found[69]["image"] == "twins, image 69"


def test_a_mixture_comes_in_the_order_given(flambeau: Any, rows: Any, make_images: Any) -> None:
    make_images(Path("az"), classes="az", per_class=2, seed=1)  # the model knows no z
    make_images(Path("many"), per_class=40, seed=2)
    assert flambeau("pack az az.rec").code == 0
    found = rows("az/z/01.png", "az.rec", "az", "many", "az/a/00.png", "az/z/01.png")
    assert [row["image"] for row in found[:1] + found[-2:]] == [
        "az/z/01.png", "az/a/00.png", "az/z/01.png"
    ]  # fmt: skip
    assert [row.get("label") for row in found[:9]] == [
        None, "a", "a", "z", "z", "a", "a", None, None
    ]  # fmt: skip
    assert [row.get("index") for row in found[:6]] == [None, 0, 1, 2, 3, None]
    assert classes(found[1:5]) == classes(found[5:9])
    assert (len(found), len({row["image"] for row in found[9:89]})) == (91, 80)
    alone = rows("az/z/01.png")
    for row in (found[0], found[-1]):  # in a first batch of 64 and a last of 27
        for one, other in zip(row["classes"], alone[0]["classes"], strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def test_lines_for_people(flambeau: Any, trained_run: Path, make_images: Any) -> None:
    make_images(Path("az"), classes="az", per_class=1)
    Path("az/readme.txt").touch()
    assert flambeau("pack az az.rec").code == 0
    answer = flambeau("predict", trained_run, "az", "az.rec", "--top 1")
    assert answer.err == "az: 1 file is left out, by ending: 1 .txt\n"
    names = [line.rpartition(": ")[0] for line in answer.out.splitlines()]
    assert names[:2] == ["az/a/00.png", "az/z/00.png"]
    assert names[2:] == [f"{Path.cwd()}/az.rec, record {k} (key {k})" for k in range(2)]


def test_names_that_a_terminal_lacks(
    flambeau: Any, rows: Any, trained_run: Path, images: Path
) -> None:
    good = images / "val" / "a" / "00.png"
    names = ["two\nlines.png", "bytes\udcff.png", "图.png"]
    Path("odd").mkdir()
    for name in names:
        shutil.copy(good, Path("odd", name))
    assert sorted(row["image"] for row in rows("odd")) == sorted(f"odd/{name}" for name in names)
    out = flambeau("predict", trained_run, "odd").out
    assert [line.partition(":")[0] for line in out.splitlines()] == [
        "odd/bytes\\udcff.png", "odd/two\\nlines.png", "odd/图.png"
    ]  # fmt: skip


# ---------------------------------------------------------------- trouble


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_damaged_image_ends_it_wherever_it_lies(
    workers: str, flambeau: Any, trained_run: Path, make_images: Any
) -> None:
    make_images(Path("good"), per_class=33)  # 66: a batch, and two more
    shutil.copytree("good", "bad")
    damaged = Path("bad/b/32.png")
    damaged.write_bytes(b"noise")
    lines = "".join(f"{path}\n" for path in sorted(Path("bad").rglob("*.png")))
    Path("bad.csv").write_text("path\n" + lines)
    command = ("predict", trained_run, "--workers", workers)
    for what in (sorted(Path("bad").rglob("*.png")), ["bad"], ["bad.csv"]):
        answer = flambeau(*command, *what)
        refused(answer, "bad/b/32.png", "not a JPEG", "--skip-bad-images", printed=True)
        assert len(answer.out.splitlines()) == 64  # of the batch before
        answer = flambeau(*command, *what, "--skip-bad-images 1")
        assert (answer.code, len(answer.out.splitlines())) == (0, 65)
        assert "bad/b/32.png" not in answer.out
        assert answer.err.startswith("left out, because it cannot be read: ")
        assert "bad/b/32.png" in answer.err


def test_no_image_that_can_be_read(flambeau: Any, trained_run: Path) -> None:
    Path("bad").mkdir()
    for name in ("1.png", "2.png"):
        Path("bad", name).write_bytes(b"noise")
    command = ("predict", trained_run, "bad", "--skip-bad-images")
    refused(flambeau(*command, "1"), "bad/2.png cannot be read, and --skip-bad-images 1 is used up")
    refused(flambeau(*command, "2"), "none of the 2 images could be read")


def test_what_cannot_be_predicted_on(flambeau: Any, trained_run: Path, images: Path) -> None:
    good = images / "val" / "a" / "00.png"
    Path("empty").mkdir()
    Path("loop/x").mkdir(parents=True)
    Path("loop/x/back").symlink_to(Path("loop").absolute())
    Path("cut.rec").write_bytes(b"\x0a\x23\xd7\xce123")
    for what, part in (
        ("empty", "empty holds no image"),
        ("loop", "is a link back to"),
        ("gone", "gone does not exist"),
        ("cut.rec", "The file is damaged"),
        ("torchvision:cifar9", "no data set is named 'cifar9'"),
        ("torchvision:cifar10:empty", "--download, which fetches cifar-10-python.tar.gz"),
    ):
        answer = flambeau("predict", trained_run, good, what)
        refused(answer, part)
        assert answer.out == ""
    for flag in ("--top 0", "--workers -1", "--skip-bad-images -1"):
        name, number = flag.split()
        refused(flambeau("predict", trained_run, good, flag), f"{name} must be at least", number)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_has_no_end_is_not_read(
    flambeau: Any, trained_run: Path, images: Path, kind: str
) -> None:
    """A link to /dev/zero took all memory, and a pipe waited for a writer."""
    endless = Path("endless.png")
    if kind == "pipe":
        os.mkfifo(endless)
    else:
        endless.symlink_to("/dev/zero")
    Path("rows.csv").write_text("image\nendless.png\n")
    for words in ("endless.png", "rows.csv"):
        answer = flambeau("predict", trained_run, words)
        assert answer.code != 0, answer
        assert "endless.png" in answer.err
        assert "Traceback" not in answer.err


def test_a_batch_is_read_when_it_is_asked_for(
    trained_run: Path, make_images: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_images(Path("many"), per_class=80)
    read, reads = FileSet.read, []

    def counted(self: FileSet, index: int) -> bytes:
        reads.append(index)
        return read(self, index)

    monkeypatch.setattr(FileSet, "read", counted)
    predictions = predict(load_trained(trained_run, say=print), [Path("many")], top=1)
    assert [len(answer.cells()) for _, answer in islice(predictions, 64)] == [2] * 64
    assert sorted(reads) == list(range(64))
    assert len(list(predictions)) == 96


def test_predictions_in_a_script(trained_run: Path, images: Path) -> None:
    trained = load_trained(trained_run, say=print)
    [(sample, answer)] = predict(trained, [images / "val" / "b" / "00.png"])
    assert (sample.image, sample.packed) == (str(images / "val" / "b" / "00.png"), None)
    shares = [one["probability"] for one in answer.as_dict()["classes"]]
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert list(predict(trained, [])) == []
    with pytest.raises(InputError, match="does not exist"):
        next(predict(trained, [Path("gone.png")]))
