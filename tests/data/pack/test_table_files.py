"""Parquet and Arrow files that flambeau packs, and what is said and saved of damaged ones."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flambeau.data.pack.encode_images import Conversion
from flambeau.data.pack.pack import pack
from flambeau.data.pack.shard_plan import Split
from flambeau.data.pack.verify import FileReport, packed_files, verify_file
from flambeau.data.sources.open_data import open_parts, open_sources
from flambeau.errors import InputError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def own_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAMBEAU_DATA", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """12 images of the classes night and zoo; day is empty in the packed files alone."""
    for number in range(12):
        path = tmp_path / "photos" / ("night", "zoo")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (14, 12), (number * 20, 9, 9)).save(path)
    return tmp_path / "photos"


def packed(source: Path, target: Path) -> Path:
    pack(source, target, Conversion(), Split(), workers=1)
    return target


def contents(path: Path) -> list[tuple[str, str, Any]]:
    source, val = open_parts(path)
    assert val is None
    labels = source.labels.tolist()
    return [
        (source.names[k], source.classes[labels[k]], source.read(k)) for k in range(len(source))
    ]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_there_and_back(folder: Path, tmp_path: Path, ending: str) -> None:
    table = packed(folder, tmp_path / f"a.{ending}")
    assert contents(table) == contents(folder)
    held_out = open_sources(table)[1]
    assert list(held_out.names) == list(open_sources(folder)[1].names)
    back = contents(packed(table, tmp_path / "b.rec"))
    assert [row[1:] for row in back] == [row[1:] for row in contents(folder)]
    assert verify_file(table, ending).good == 12
    assert verify_file(table, ending).checksums


def test_the_same_command_makes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    one, other = (packed(folder, tmp_path / name) for name in ("a.parquet", "b.parquet"))
    assert one.read_bytes() == other.read_bytes()


def test_datasets_shows_images_with_names(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    packed(folder, tmp_path / "a.parquet")
    packed(folder, tmp_path / "a.arrow")
    script = """
import sys, datasets
root = sys.argv[1]
for data in (
    datasets.load_dataset("parquet", data_files=f"{root}/a.parquet", split="train"),
    datasets.Dataset.from_file(f"{root}/a.arrow"),
):
    row = data[1]
    print(data.features["label"].int2str(row["label"]), row["image"].size, row["image"].getpixel((0, 0)))
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.stdout.splitlines() == ["night (14, 12) (200, 9, 9)"] * 2  # by name: 0, 10, ...


def grouped(folder: Path, tmp_path: Path, **options: Any) -> Path:
    """Four row groups of three images, with another column, and pages that have checksums."""
    table = pq.read_table(packed(folder, tmp_path / "whole.parquet"))
    table = table.append_column("note", pa.array([f"note {k}" for k in range(12)]))
    path = tmp_path / "grouped.parquet"
    pq.write_table(table, path, row_group_size=3, write_page_checksum=True, **options)
    return path


def check(path: Path, **options: Any) -> FileReport:
    ((file, kind),) = packed_files(path)
    return verify_file(file, kind, **options)


def test_a_damaged_row_group_is_named_and_the_others_are_saved_whole(
    folder: Path, tmp_path: Path
) -> None:
    path = grouped(
        folder, tmp_path, use_dictionary=False, compression="none", write_statistics=False
    )
    data = bytearray(path.read_bytes())
    image = (folder / "night" / "4.png").read_bytes()
    data[data.index(image) + len(image) // 2] ^= 1
    path.write_bytes(data)
    report = check(path, salvage=tmp_path / "good.parquet")
    assert [damage.record for damage in report.damaged] == ["rows 3 to 5, in row group 1"]
    assert "CRC" in report.damaged[0].what
    assert (report.good, report.saved) == (9, True)
    saved = pq.read_table(tmp_path / "good.parquet")
    assert saved["note"].to_pylist() == [f"note {k}" for k in (0, 1, 2, 6, 7, 8, 9, 10, 11)]
    assert saved.schema.metadata[b"huggingface"] == pq.read_schema(path).metadata[b"huggingface"]
    with pytest.raises(InputError, match="CRC"):
        open_parts(path)


def test_rows_that_training_refuses_are_named(folder: Path, tmp_path: Path) -> None:
    table = pq.read_table(packed(folder, tmp_path / "whole.parquet"))
    labels = table["label"].to_pylist()
    labels[2], labels[5], labels[7] = None, 9, -1
    rows = table["image"].to_pylist()
    rows[1] = {"bytes": b"no image", "path": "x.png"}
    rows[3] = {"bytes": None, "path": "gone.png"}
    changed = pa.table({"image": pa.array(rows, table.schema.field("image").type), "label": labels})
    changed = changed.replace_schema_metadata(table.schema.metadata)
    pq.write_table(changed, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", changed.schema) as writer:
        writer.write_table(changed)
    for name in ("a.parquet", "a.arrow"):
        report = check(tmp_path / name)
        assert [damage.record.partition(" (")[0] for damage in report.not_read] == [
            "row 2", "row 3", "row 5", "row 7"
        ]  # fmt: skip
        assert [damage.record for damage in report.damaged] == ["row 1 (x.png)"]
        assert "label 9 is no number of a class" in report.not_read[2].what
        assert report.good == 7


def test_a_cut_arrow_file_keeps_what_is_before_the_cut(folder: Path, tmp_path: Path) -> None:
    table = pq.read_table(packed(folder, tmp_path / "whole.parquet"))
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    data = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(data[:-200])
    report = check(tmp_path / "a.arrow")
    assert len(report.damaged) == 1


def test_the_folder_of_a_repository_is_verified_file_by_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "repository" / "data").mkdir(parents=True)
    packed(folder, tmp_path / "repository" / "data" / "train.parquet")
    (tmp_path / "repository" / "README.md").write_text("a card")
    assert check(tmp_path / "repository").good == 12


def test_verify_makes_no_copy(folder: Path, tmp_path: Path) -> None:
    table = packed(folder, tmp_path / "whole.parquet")
    assert check(table).good == 12
    assert not (tmp_path / "home").exists()
