"""Files of arrays that are cut short: what lies in them whole is saved with its label, and nothing else."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.pack import salvage_arrays as array_rescue
from flambeau.data.pack.encode_images import Conversion
from flambeau.data.pack.pack import pack
from flambeau.data.pack.shards import Split
from flambeau.data.pack.verify import FileReport, packed_files, verify_file
from flambeau.data.sources.open_data import open_source

SIDE = 16
NUM_IMAGES = 10


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classes a and b, of five grey PNG files of noise each."""
    root = tmp_path_factory.mktemp("small")
    generator = np.random.default_rng(0)
    for name in "ab":
        (root / name).mkdir()
        for index in range(5):
            pixels = generator.integers(0, 256, (SIDE, SIDE), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index}.png")
    return root


def images_of(path: Path) -> list[tuple[str, bytes]]:
    source = open_source(path, ("a", "b"))
    stored = (source.read(index) for index in range(len(source)))
    data = [image if isinstance(image, bytes) else image.tobytes() for image in stored]
    return list(zip((source.classes[k] for k in source.labels.tolist()), data, strict=True))


def salvage(path: Path) -> tuple[FileReport, Path]:
    saved = path.with_name(f"s{path.suffix}")
    ((_, kind),) = packed_files(path)
    return verify_file(path, kind, workers=2, salvage=saved), saved


def pixels(count: int, dtype: str = "uint8") -> np.ndarray:
    return np.random.default_rng(1).integers(1, 200, (count, SIDE, SIDE)).astype(dtype)


@pytest.mark.parametrize("notes", [True, False])
@pytest.mark.parametrize(
    "name", ["raw.npy", "raw.npz", "keep.npz", "raw.pth", "keep.pth", "raw.h5", "keep.h5"]
)
def test_a_cut_loses_what_lay_behind_it(
    name: str, notes: bool, small: Path, tmp_path: Path
) -> None:
    if name.endswith("h5"):
        pytest.importorskip("h5py")
    path = tmp_path / name
    pack(small, path, Conversion(path.stem), Split(), workers=1)
    if not notes:
        (tmp_path / f"{name}.pack.json").unlink()
    before, whole = images_of(path), path.read_bytes()
    ends = [whole.index(image) + len(image) for _, image in before]
    for size in (len(whole) - 1, ends[-1] - 1, ends[6] + 1, ends[0]):
        path.write_bytes(whole[:size])
        report, saved = salvage(path)
        there = sum(end <= size for end in ends)
        assert report.good == there
        assert report.damaged[0].record == "the file"
        assert images_of(saved) == before[:there]
        if there < NUM_IMAGES:
            lost = report.damaged[1]
            assert lost.record.startswith(f"images[{there}]")
            assert lost.offset == ends[there] - len(before[there][1])
        for made in tmp_path.glob("s.*"):
            made.unlink()
        (tmp_path / "s_labels.npy").unlink(missing_ok=True)
    path.write_bytes(whole[:100])
    report, _ = salvage(path)
    assert (report.good, report.saved) == (0, False)


@pytest.mark.parametrize("ending", ["npz", "pth"])
def test_bytes_missing_in_the_middle_are_no_cut(ending: str, small: Path, tmp_path: Path) -> None:
    """All behind them has moved, so no image is where it should be; the zip file's directory tells."""
    path = tmp_path / f"a.{ending}"
    pack(small, path, Conversion("raw"), Split(), workers=1)
    (tmp_path / f"a.{ending}.pack.json").unlink()
    whole, (_, image) = path.read_bytes(), images_of(path)[2]
    at = whole.index(image) + 50
    end = at - 50 + 8 * len(image)  # of the last
    for damaged in (
        whole[:at] + whole[at + 1 :], whole[:at] + whole[at + 1000 :],
        whole[: end - 9] + bytes(len(whole) - end + 9),  # zeros up to the end, as a crash leaves them
    ):  # fmt: skip
        path.write_bytes(damaged)
        assert salvage(path)[0].good == 0


def test_labels_behind_the_images(tmp_path: Path) -> None:
    """As earlier versions wrote them, and as users do: a cut takes them first, which is said."""
    images, labels = pixels(6), np.arange(6) % 3
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    whole = (tmp_path / "a.npz").read_bytes()
    directory = whole.index(b"PK\1\2")
    (tmp_path / "a.npz").write_bytes(whole[: directory - 8 * 2])
    report, saved = salvage(tmp_path / "a.npz")
    assert report.good == 4  # the labels of two are lost
    with np.load(saved) as found:
        np.testing.assert_array_equal(found["images"], images[:4])
        np.testing.assert_array_equal(found["labels"], labels[:4])
    (tmp_path / "a.npz").write_bytes(whole[: directory - 8 * 6])
    (tmp_path / "s.npz").unlink()
    assert "6 images and 0 labels are left" in salvage(tmp_path / "a.npz")[0].damaged[1].what
    (tmp_path / "a.npz").write_bytes(whole[: directory - 8 * 6 - 100])
    assert "only images (6, 16, 16)" in salvage(tmp_path / "a.npz")[0].damaged[1].what


def test_numbers_of_images_and_labels_that_never_fitted(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", pixels(6))
    np.save(tmp_path / "a_labels.npy", np.zeros(5, int))
    report, _ = salvage(tmp_path / "a.npy")
    assert (report.good, report.damaged[1].what[-19:]) == (0, "6 images and 5 labels"[-19:])


def test_class_names_stay_those_of_their_images(tmp_path: Path) -> None:
    words = np.array(["cat", "ant", "bee", "cat", "bee", "dog"])
    np.savez(tmp_path / "a.npz", labels=words, images=pixels(6))
    path = tmp_path / "a.npz"
    path.write_bytes(path.read_bytes()[:-600])
    report, saved = salvage(path)
    assert report.good == 4  # three classes are left
    assert open_source(saved, ("ant", "bee", "cat")).labels.tolist() == [2, 0, 1, 2]
    # Names as many as the images that are left would be taken for theirs.
    classes = np.array(["ant", "bee", "cat", "dog"])
    np.savez(path, classes=classes, labels=np.arange(6) % 4, images=pixels(6))
    path.write_bytes(path.read_bytes()[:-600])
    saved.unlink()
    assert salvage(path)[0].good == 0


def test_tensors_of_parts_and_of_16_bits(tmp_path: Path) -> None:
    made = {
        part: {"y": torch.arange(4) % 2, "x": torch.from_numpy(pixels(6, "uint16"))[2:]}
        for part in ("train", "val")
    }
    path = tmp_path / "a.pth"
    torch.save(made, path)
    path.write_bytes(path.read_bytes()[:-1])
    report, saved = salvage(path)
    assert report.good == 8
    source = open_source(saved, ("0", "1"))
    assert np.array_equal(source.read(5), pixels(6, "uint16")[3])


def test_tensors_that_do_not_lie_as_they_would_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, images = tmp_path / "a.pth", torch.from_numpy(pixels(4))
    for tensor, order in ((images.mT, "little"), (images, "big")):
        torch.save({"y": torch.arange(4), "x": tensor}, path)
        path.write_bytes(path.read_bytes()[:-1])
        monkeypatch.setattr(array_rescue, "sys", SimpleNamespace(byteorder=order))
        assert salvage(path)[0].good == 0


def test_pickles_that_would_run_something_and_compressed_arrays(tmp_path: Path) -> None:
    torch.save({"images": torch.nn.Linear(1, 1), "labels": torch.zeros(2)}, tmp_path / "a.pth")
    np.savez_compressed(tmp_path / "b.npz", images=pixels(4), labels=np.zeros(4, int))
    for name in ("a.pth", "b.npz"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-1])
        assert salvage(path)[0].good == 0
