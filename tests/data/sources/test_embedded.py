"""The data that ships with the package: what ORIGIN.md says of it is so, and the pixels are the originals."""

import hashlib
import io
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

import flambeau
from flambeau.recipes.data.recordio import RecordReader, unpack

FOLDER = Path(flambeau.__file__).parent / "data" / "embedded"
ORIGINAL = Path(__file__).resolve().parents[4] / "shared" / "datasets" / "fashion_mnist.npz"
SPLITS = [("train", "train", 600), ("val", "test", 100)]


class Sample(NamedTuple):
    label: int
    number: int
    image: bytes


def read(name: str) -> list[Sample]:
    with RecordReader(FOLDER / f"fashion_mnist_{name}.rec") as reader:
        samples = []
        for key, record in zip(reader.keys, reader, strict=True):
            header, image = unpack(record)
            assert (header.flag, header.id, header.id2) == (0, key, 0)
            assert header.label == int(header.label)
            samples.append(Sample(int(header.label), header.id, image))
    return samples


def pixels(sample: Sample) -> np.ndarray:
    with Image.open(io.BytesIO(sample.image)) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "L", (28, 28))
        return np.asarray(image)


@pytest.mark.parametrize(("name", "_source", "num_each"), SPLITS)
def test_balanced_and_readable(name: str, _source: str, num_each: int) -> None:
    samples = read(name)
    assert Counter(sample.label for sample in samples) == dict.fromkeys(range(10), num_each)
    numbers = [sample.number for sample in samples]
    assert numbers == sorted(set(numbers))
    # No image twice, none empty.
    assert len({pixels(sample).tobytes() for sample in samples}) == len(samples)
    assert all(pixels(sample).max() > 100 for sample in samples[::50])


@pytest.mark.parametrize(("name", "_source", "num_each"), SPLITS)
def test_readable_without_the_index(tmp_path: Path, name: str, _source: str, num_each: int) -> None:
    copy = tmp_path / "copy.rec"
    copy.write_bytes((FOLDER / f"fashion_mnist_{name}.rec").read_bytes())
    with RecordReader(copy) as reader:
        assert len(reader) == 10 * num_each
        assert [unpack(record)[1] for record in reader] == [sample.image for sample in read(name)]


@pytest.mark.parametrize(("name", "_source", "num_each"), SPLITS)
def test_origin_tells_the_truth(name: str, _source: str, num_each: int) -> None:
    data = (FOLDER / f"fashion_mnist_{name}.rec").read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    row = f"| fashion_mnist_{name}.rec | {10 * num_each} | {len(data)} | {sha256} |\n"
    assert row in (FOLDER / "ORIGIN.md").read_text(encoding="utf-8")
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 5_000_000


def test_licence_is_that_of_the_data() -> None:
    text = (FOLDER / "LICENSE").read_text(encoding="utf-8")
    assert "The MIT License" in text
    assert "2017 Zalando SE, https://tech.zalando.com" in text
    assert "The above copyright notice and this permission notice shall be included" in text


def test_class_names() -> None:
    names = (FOLDER / "fashion_mnist.classes.txt").read_text(encoding="utf-8").splitlines()
    assert (len(names), names[0], names[9]) == (10, "T-shirt/top", "Ankle boot")


@pytest.mark.skipif(not ORIGINAL.is_file(), reason=f"no {ORIGINAL}")
@pytest.mark.parametrize(("name", "source", "num_each"), SPLITS)
def test_the_first_of_each_class_with_their_own_pixels(
    name: str, source: str, num_each: int
) -> None:
    arrays = np.load(ORIGINAL, allow_pickle=False)
    labels, images_NHW = arrays[f"y_{source}"], arrays[f"x_{source}"]
    seen: Counter[int] = Counter()
    expected = []
    for number, label in enumerate(labels.tolist()):
        seen[label] += 1
        if seen[label] <= num_each:
            expected.append((label, number))
    samples = read(name)
    assert [(sample.label, sample.number) for sample in samples] == expected
    for sample in samples[::10]:
        np.testing.assert_array_equal(pixels(sample), images_NHW[sample.number])
    names = (FOLDER / "fashion_mnist.classes.txt").read_text(encoding="utf-8").splitlines()
    assert names == arrays["classes"].tolist()
