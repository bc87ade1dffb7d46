"""Files of a data folder that are not read: by content where names say little, counted by each command."""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flambeau.data.sources.open_data import open_parts
from flambeau.images.decode import decode
from refused import refused

READ = ["0.jpg", "1.JFIF", "2.jpe", "3.mpo", "4.pgm", "5.PNM", "6.avif", "7.heic", "8", "9.jxl"]
JPEG_XL = b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(20)
OTHER = {"a.jxl": JPEG_XL, "b.jp2": b"\xff\x4f\xff\x51" + bytes(20), "c.txt": b"a cat", "d": b"-"}
LINE = (
    "4 files are left out, by ending: 1 without ending, 1 .jp2 (such as a JPEG 2000 image), "
    "1 .jxl (such as a JPEG XL image), 1 .txt"
)


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    kinds = {".pgm": "PPM", ".PNM": "PPM", ".avif": "AVIF", "": "PNG"}
    for number, name in enumerate(("cat", "dog")):
        folder = Path("data", name)
        folder.mkdir(parents=True)
        for k, file in enumerate(READ):
            kind = kinds.get(Path(file).suffix, "JPEG")
            image = Image.new("L", (12, 12), 100 * number + 10 * k)
            image.save(folder / file, kind, quality=95)
    for file, content in OTHER.items():
        Path("data", "dog", file).write_bytes(content)
    yield


def test_what_the_bytes_say_is_read() -> None:
    source, _ = open_parts(Path("data"))
    assert sorted({name.partition("/")[2] for name in source.names}) == sorted(READ)
    for index, name in enumerate(source.names):
        level = 100 * name.startswith("dog") + 10 * int(Path(name).name[0])
        assert np.abs(decode(source.read(index), channels=1).astype(int) - level).max() <= 3


def test_each_command_counts_what_it_leaves_out(flambeau: Any) -> None:
    trained = flambeau("train data --epochs 1 --model tiny_convnet --image-size 12 --out run")
    assert trained.code == 0
    assert LINE in trained.out + trained.err
    assert LINE in Path("run", "report.html").read_text()
    assert LINE in flambeau("check data").out
    counts = json.loads(flambeau("check data --json").out)["left_out"]
    assert counts == {".jxl": 1, ".jp2": 1, ".txt": 1, "": 1}
    for command in ("evaluate run data", "predict run data", "pack data data.rec"):
        assert LINE in flambeau(command).err


def test_columns_of_a_table_are_named_once_for_all_shards(flambeau: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    image = Path("data", "cat", "0.jpg").read_bytes()
    Path("shards").mkdir()
    for number in range(2):
        columns = {"image": [image] * 4, "label": ["cat", "dog"] * 2, "quality": [1, 2, 3, 4]}
        parquet.write_table(pa.table(columns), f"shards/part-{number:05}-of-00002.parquet")
    lines = flambeau("check shards").out.splitlines()
    (line,) = [line for line in lines if "columns that are not read" in line]
    assert line.endswith(": quality")
    told = json.loads(flambeau("check shards --json").out)
    assert told["columns_left_out"] == ["quality"]


@pytest.mark.parametrize("names", [("train", "dev"), ("Trainval", "TEST"), ("input", "gt")])
def test_folders_that_are_no_classes_are_refused(flambeau: Any, names: tuple[str, str]) -> None:
    for name, old in zip(names, ("cat", "dog"), strict=True):
        Path("other").mkdir(exist_ok=True)
        Path("data", old).rename(Path("other", name))
    answer = flambeau("train other --out run")
    if names == ("input", "gt"):  # images and masks, of equal names; some are no JPEG
        refused(answer, "its mask", "gt/0.jpg", "a JPEG, which blurs the numbers of classes")
    else:
        refused(answer, f"{names[0]}/", f"{names[1]}/", "look like")


def test_nothing_is_said_where_nothing_is_left_out(flambeau: Any) -> None:
    for file in OTHER:
        Path("data", "dog", file).unlink()
    assert "left out" not in flambeau("check data").out


def test_samples_of_a_tar_file_without_an_image_are_counted(flambeau: Any) -> None:
    with tarfile.open("data.tar", "w") as tar:
        for k, name in enumerate(["cat/0.jpg", "dog/1.jpg", "cat/2.jpg", "dog/3.jpg", "dog/4.jxl"]):
            data = JPEG_XL if k == 4 else Path("data", "cat", "0.jpg").read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    assert "data.tar: 1 file is left out, by ending: 1 .jxl" in flambeau("check data.tar").out


def test_an_image_of_another_format_is_named_as_what_it_is(flambeau: Any) -> None:
    Path("data", "cat", "x.jpg").write_bytes(JPEG_XL)
    answer = flambeau("train data --epochs 1 --model tiny_convnet --image-size 12 --out run")
    refused(answer, "x.jpg", "JPEG XL image")
