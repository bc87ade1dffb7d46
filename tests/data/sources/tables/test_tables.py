"""Parquet and Arrow files of images, as Hugging Face and others write them; datasets itself is the peer."""

import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flambeau.data.sources.open_data import open_parts, open_source, open_sources, open_unlabelled
from flambeau.data.sources.source import Source
from flambeau.data.sources.tables import hugging_face, parquet_file
from flambeau.errors import DamagedData, InputError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CAT_DOG = {"_type": "ClassLabel", "names": ["cat", "dog"]}
IMAGE = {"_type": "Image"}


@pytest.fixture(autouse=True)
def own_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAMBEAU_DATA", str(tmp_path / "home"))


def png(number: int) -> bytes:
    target = io.BytesIO()
    Image.new("RGB", (12, 10), (number % 256, 90, 7)).save(target, "PNG")
    return target.getvalue()


def table_of(columns: Mapping[str, Any], features: Mapping[str, Any] | None = None) -> Any:
    table = pa.table(dict(columns))
    if features is not None:
        told = json.dumps({"info": {"features": dict(features)}})
        table = table.replace_schema_metadata({"huggingface": told})
    return table


def images(count: int, *, paths: bool = True) -> Any:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": png(k), "path": f"{k}.png" if paths else None} for k in range(count)]
    return pa.array(rows, kind)


def hub_table(count: int) -> Any:
    """As datasets.Dataset.to_parquet writes it."""
    labels = [k % 2 for k in range(count)]
    return table_of({"image": images(count), "label": labels}, {"image": IMAGE, "label": CAT_DOG})


def write_arrow(table: Any, path: Path, *, footer: bool = False, **options: Any) -> Path:
    make = pa.ipc.new_file if footer else pa.ipc.new_stream
    with make(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def write_parquet(table: Any, path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def all_of(path: Path) -> Source:
    source, val = open_parts(path)
    assert val is None
    return source


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_parts(path)
    return str(caught.value)


def test_parquet_as_hugging_face_writes_it(tmp_path: Path) -> None:
    path = write_parquet(hub_table(30), tmp_path / "photos.parquet", row_group_size=8)
    train, val = open_sources(path)
    assert train.classes == val.classes == ("cat", "dog")
    assert (len(train), len(val)) == (26, 4)  # a tenth of 15 each, rounded
    source = all_of(path)
    assert [source.read(k) for k in range(30)] == [png(k) for k in range(30)]
    assert source.labels.tolist() == [k % 2 for k in range(30)]
    assert list(source.names[:2]) == ["0.png", "1.png"]
    assert source.describe(3) == f"{path}, row 3"


@pytest.mark.parametrize("footer", [False, True])
def test_arrow_streams_and_files_are_read_where_they_lie(tmp_path: Path, footer: bool) -> None:
    source = all_of(write_arrow(hub_table(20), tmp_path / "a.arrow", footer=footer))
    assert [source.read(k) for k in range(20)] == [png(k) for k in range(20)]
    assert source.classes == ("cat", "dog")
    assert not (tmp_path / "home").exists()


def test_a_pickled_source_reads_the_same_without_the_data_in_the_pickle(tmp_path: Path) -> None:
    table = table_of({"image": [os.urandom(1 << 18)] * 4, "label": [0, 1, 0, 1]})
    source = all_of(write_arrow(table, tmp_path / "a.arrow"))
    pickled = pickle.dumps(source)
    assert len(pickled) < 1 << 14
    assert pickle.loads(pickled).read(3) == source.read(3)
    with (tmp_path / "a.arrow").open("ab") as file:
        file.write(b"more")
    with pytest.raises(OSError, match="when it was opened"):
        pickle.loads(pickled)


def test_the_copy_is_made_once_and_again_when_the_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_parquet(hub_table(6), tmp_path / "a.parquet")
    before = all_of(path)
    copies = list((tmp_path / "home" / "parquet").glob("*.arrow"))
    assert len(copies) == 1
    assert f"{path}: its images are copied once, into {copies[0]}" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(parquet_file, "_copy", None)
        assert all_of(path).fingerprint == before.fingerprint
    write_parquet(hub_table(8), path)
    changed = all_of(path)
    assert (len(changed), changed.read(7)) == (8, png(7))
    assert changed.fingerprint != before.fingerprint
    assert len(list((tmp_path / "home" / "parquet").glob("*.arrow"))) == 1


def test_no_room_for_the_copy_is_one_message_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(hub_table(6), tmp_path / "a.parquet")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FLAMBEAU_DATA", str(tmp_path / "file" / "below"))
    assert "FLAMBEAU_DATA" in refusal(path)


# ---------------------------------------------------------------- columns


def test_bytes_alone_and_names_as_words(tmp_path: Path) -> None:
    table = table_of({"id": [1, 2, 3], "jpg": [png(1), png(2), png(3)], "class": ["b", "a", "b"]})
    source = all_of(write_parquet(table, tmp_path / "a.parquet"))
    assert (source.classes, source.labels.tolist()) == (("a", "b"), [1, 0, 1])
    assert source.read(1) == png(2)
    assert list(source.names) == ["0", "1", "2"]


@pytest.mark.parametrize("kind", ["large_binary", "dictionary"])
def test_other_types_of_the_same(tmp_path: Path, kind: str) -> None:
    files: Any = pa.array([png(1), png(2), png(3)], pa.large_binary())
    labels: Any = [1, 0, 1]
    if kind == "dictionary":
        labels = pa.array(["dog", "cat", "dog"]).dictionary_encode()
    table = table_of({"image": files, "labels": labels})
    for path in (
        write_arrow(table, tmp_path / "a.arrow"),
        write_parquet(table, tmp_path / "b.parquet"),
    ):
        source = all_of(path)
        assert source.labels.tolist() == [1, 0, 1]
        assert source.classes == (("cat", "dog") if kind == "dictionary" else ("0", "1"))
        assert [source.read(k) for k in range(3)] == [png(1), png(2), png(3)]


def test_of_several_columns_the_usual_name_counts(tmp_path: Path) -> None:
    fine, coarse = (
        {"_type": "ClassLabel", "names": ["cat", "dog"]},
        {"_type": "ClassLabel", "names": ["pet"]},
    )
    table = table_of(
        {"mask": images(4), "img": images(4), "coarse_label": [0] * 4, "fine_label": [0, 1, 1, 0]},
        {"mask": IMAGE, "img": IMAGE, "coarse_label": coarse, "fine_label": fine},
    )
    source = all_of(write_parquet(table, tmp_path / "cifar.parquet"))
    assert (source.classes, source.labels.tolist()) == (("cat", "dog"), [0, 1, 1, 0])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"left": [b"x"], "right": [b"y"], "label": [0]}, ["several", "images: left, right", "FILE.py"]),
        ({"a": [1], "b": ["x"]}, ["no column of images (found: a int64, b string)"]),
        ({"image": [b"x"], "caption": ["y"]}, ["no column of labels", "caption string"]),
        ({"image": [b"x"], "label": [{"a": 1}]}, ["'label' holds struct<", "number of a class"]),
        ({"image": [b"x"], "label": pa.array([None], pa.int64())}, ["row 0: no label", "null"]),
        ({"image": [b"x"], "label": [-3]}, ["row 0: label -3"]),
        ({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}, ["no images"]),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(
    tmp_path: Path, columns: Mapping[str, Any], words: Sequence[str]
) -> None:
    for name in ("a.parquet", "a.arrow"):
        write = write_parquet if name.endswith("parquet") else write_arrow
        message = refusal(write(table_of(columns), tmp_path / name))
        assert message.count("\n") <= 1
        assert [word for word in (*words, name) if word not in message] == []


def test_labels_that_hugging_face_leaves_out_are_minus_one(tmp_path: Path) -> None:
    table = table_of({"image": images(2), "label": [0, -1]}, {"image": IMAGE, "label": CAT_DOG})
    path = write_parquet(table, tmp_path / "test.parquet")
    assert "row 1: no label: 'label' is -1" in refusal(path)
    (opened,) = open_unlabelled([path], ("cat", "dog"))
    assert opened.source.classes == ("",)


def test_two_columns_of_labels_are_refused_by_their_names(tmp_path: Path) -> None:
    table = table_of(
        {"image": images(1), "kind": [0], "breed": [1]},
        {"image": IMAGE, "kind": CAT_DOG, "breed": CAT_DOG},
    )
    assert "several columns of labels: kind, breed" in refusal(
        write_parquet(table, tmp_path / "a.parquet")
    )


# ---------------------------------------------------------------- rows without bytes


def test_a_row_without_bytes_is_the_file_of_its_path_or_a_bad_image(tmp_path: Path) -> None:
    (tmp_path / "7.png").write_bytes(png(7))
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [
        {"bytes": None, "path": "7.png"},
        {"bytes": None, "path": "gone.png"},
        {"bytes": None, "path": "https://host/1.png"},
        None,
    ]
    table = table_of({"image": pa.array(rows, kind), "label": [0, 1, 0, 1]})
    for path in (
        write_parquet(table, tmp_path / "a.parquet"),
        write_arrow(table, tmp_path / "a.arrow"),
    ):
        source = all_of(path)
        assert source.read(0) == png(7)
        with pytest.raises(FileNotFoundError):
            source.read(1)
        with pytest.raises(OSError, match="address https://host"):
            source.read(2)
        with pytest.raises(OSError, match="neither bytes nor a path"):
            source.read(3)


# ---------------------------------------------------------------- folders


@pytest.mark.parametrize("below", ["", "data", "plain_text"])
def test_a_folder_as_the_hub_has_it(tmp_path: Path, below: str) -> None:
    root = tmp_path / "set"
    for name, count in (
        ("train-00000-of-00002", 6),
        ("train-00001-of-00002", 4),
        ("test-00000-of-00001", 3),
    ):
        write_parquet(hub_table(count), root / below / f"{name}.parquet")
    (root / "README.md").write_text("a card", encoding="utf-8")
    train, val = open_sources(root)
    assert (len(train), len(val), train.classes) == (10, 3, ("cat", "dog"))
    assert len(open_source(root, ("cat", "dog"))) == 3  # as flambeau evaluate opens it
    (opened,) = open_unlabelled([root], ("cat", "dog"))
    assert len(opened.source) == 3


def save_to_disk(root: Path, splits: Mapping[str, Sequence[int]]) -> Path:
    """The layout of datasets 5.2, compared with datasets itself below."""
    for split, counts in splits.items():
        (root / split).mkdir(parents=True)
        names = [f"data-{k:05}-of-{len(counts):05}.arrow" for k in range(len(counts))]
        for name, count in zip(names, counts, strict=True):
            write_arrow(hub_table(count), root / split / name)
        state = {"_data_files": [{"filename": name} for name in names], "_split": split or None}
        (root / split / "state.json").write_text(json.dumps(state), encoding="utf-8")
    if "" not in splits:
        (root / "dataset_dict.json").write_text(
            json.dumps({"splits": list(splits)}), encoding="utf-8"
        )
    return root


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    train, val = open_sources(save_to_disk(tmp_path / "both", {"train": [5, 4], "test": [3]}))
    assert (len(train), len(val), train.classes) == (9, 3, ("cat", "dog"))
    assert len(all_of(save_to_disk(tmp_path / "one", {"": [5, 4]}))) == 9
    assert len(all_of(save_to_disk(tmp_path / "test", {"test": [5]}))) == 5
    message = refusal(save_to_disk(tmp_path / "odd", {"a": [2], "b": [2]}))
    assert "has the splits a, b" in message


@pytest.mark.parametrize("filename", ["../one/data-00000-of-00001.arrow", "/etc/passwd", 3, None])
def test_a_saved_folder_names_no_file_elsewhere(tmp_path: Path, filename: object) -> None:
    root = save_to_disk(tmp_path / "saved", {"": [2]})
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": filename}]}))
    assert "state.json names no files of a data set" in refusal(root)


def test_damaged_json_of_a_saved_folder(tmp_path: Path) -> None:
    root = save_to_disk(tmp_path / "saved", {"": [2]})
    for text in ("{", "[]", '{"_data_files": {}}', "[" * 100_000):
        (root / "state.json").write_text(text)
        assert "state.json" in refusal(root)


# ---------------------------------------------------------------- hostile files


def test_a_cut_file_is_damaged(tmp_path: Path) -> None:
    whole = {
        "a.parquet": write_parquet(hub_table(20), tmp_path / "a.parquet").read_bytes(),
        "a.arrow": write_arrow(hub_table(20), tmp_path / "a.arrow").read_bytes(),
    }
    for name, data in whole.items():
        path = tmp_path / f"cut_{name}"
        for size in (4, 100, len(data) // 2, len(data) - 9):
            path.write_bytes(data[:size])
            if name == "a.arrow" and size == len(data) - 9:
                continue  # nothing but the mark of the end is lost
            with pytest.raises(DamagedData, match=str(path)):
                open_parts(path)


def test_compressed_arrow_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    table = table_of({"image": [bytes(1 << 24)] * 3, "label": [0, 1, 0]})
    for footer in (False, True):
        path = write_arrow(table, tmp_path / "a.arrow", footer=footer, compression="zstd")
        before = pa.total_allocated_bytes()
        assert "compressed" in refusal(path)
        assert pa.total_allocated_bytes() - before < 1 << 20


def test_a_file_that_unpacks_to_many_times_its_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_file, "SMALL", 1 << 20)
    table = table_of({"image": [bytes(1 << 17)] * 200, "label": [0] * 200})
    path = write_parquet(table, tmp_path / "a.parquet")  # one entry of a dictionary, 200 times
    assert path.stat().st_size < 1 << 18
    assert "more than 32 times its size" in refusal(path)
    plain = write_parquet(table, tmp_path / "b.parquet", use_dictionary=False, compression="zstd")
    assert "claims to unpack to" in refusal(plain)
    assert list((tmp_path / "home" / "parquet").glob("*.arrow")) == []
    assert not any(".arrow" in file.name for file in (tmp_path / "home" / "parquet").iterdir())


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_mutated_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    write = write_parquet if name == "a.parquet" else write_arrow
    data = write(hub_table(12), tmp_path / name).read_bytes()
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for number in range(60):
        places = torch.randint(len(data), (3,), generator=generator).tolist()
        changed = bytearray(data)
        for place in (*places, len(data) - 1 - places[0] % 1500):
            changed[place] ^= 1 << number % 8
        (tmp_path / name).write_bytes(changed)
        os.utime(tmp_path / name, ns=(number, number))
        try:
            source, _ = open_parts(tmp_path / name)
        except InputError:
            refused += 1
        else:
            for index in range(len(source)):
                source.read(index)
    assert refused


# ---------------------------------------------------------------- datasets itself, and the Hub


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What datasets writes, in a process of its own: its import is slow and starts threads."""
    pytest.importorskip("datasets")
    root = tmp_path_factory.mktemp("peer")
    script = """
import sys, datasets
from pathlib import Path
root = Path(sys.argv[1])
files = sorted((root / "png").iterdir(), key=lambda path: int(path.stem))
features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
rows = {"image": [{"bytes": f.read_bytes(), "path": f.name} for f in files]}
rows["label"] = [int(f.stem) % 2 for f in files]
data = datasets.Dataset.from_dict(rows, features=features)
both = datasets.DatasetDict(train=data, test=data.select(range(5)))
both.save_to_disk(root / "saved")
for name, part in both.items():
    part.to_parquet(root / "hub" / "data" / f"{name}-00000-of-00001.parquet")
cached = datasets.load_dataset(str(root / "hub"))
print(cached["train"].cache_files[0]["filename"])
"""
    (root / "png").mkdir()
    for number in range(20):
        (root / "png" / f"{number}.png").write_bytes(png(number))
    environment = {**os.environ, "HF_HOME": str(root / "home"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", script, str(root)], env=environment, check=True, capture_output=True, text=True
    )  # fmt: skip
    # What a download of peer/photos leaves behind.
    cached = Path(ran.stdout.splitlines()[-1]).parents[3]
    cached.rename(cached.with_name("peer___photos"))
    for file in cached.with_name("peer___photos").rglob("hub-*"):
        file.rename(file.with_name(file.name.replace("hub-", "photos-")))
    yield root


def test_what_datasets_writes(peer: Path) -> None:
    for folder in ("saved", "hub"):
        train, val = open_sources(peer / folder)
        assert (len(train), len(val), train.classes) == (20, 5, ("cat", "dog"))
        assert [train.read(k) for k in range(20)] == [png(k) for k in range(20)]
        assert train.labels.tolist() == [k % 2 for k in range(20)]
        assert list(train.names[:2]) == ["0.png", "1.png"]


@pytest.mark.parametrize("name", ["FOLDER", "peer/photos", "peer/photos:default"])
def test_names_of_the_hub(peer: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HF_HOME", str(peer / "home"))
    name = name.replace("FOLDER", str(peer / "hub"))
    train, val = open_sources(Path(f"hf:{name}"))
    assert (len(train), len(val), train.classes) == (20, 5, ("cat", "dog"))
    assert train.read(3) == png(3)
    (opened,) = open_unlabelled([Path(f"hf:{name}")], ("cat", "dog"))
    assert (len(opened.source), opened.source.classes) == (5, ("cat", "dog"))


def test_a_name_that_is_not_there_says_how_it_gets_there(
    peer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(peer / "home"))
    message = refusal(Path("hf:peer/unknown"))
    assert message.startswith("hf:peer/unknown is not on this machine: --download fetches it; ")
    assert message.count("\n") == 0
    assert refusal(Path("hf:./none")) == "hf:./none: there is no folder ./none"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            "ConnectionError('Reach: HEAD')",
            "hf:x/y cannot be fetched: https://huggingface.co does not answer; ",
        ),
        (
            "ValueError('BuilderConfig')",
            "hf:x/y cannot be loaded: ValueError: BuilderConfig\nLook at its name",
        ),
    ],
)
def test_what_the_hub_says_is_said_in_a_line(
    error: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = hugging_face._LOAD.replace("import datasets", f"raise {error}")
    monkeypatch.setattr(hugging_face, "_LOAD", code)
    with pytest.raises(InputError) as caught:
        hugging_face.open_hub("x/y", download=True)
    assert str(caught.value).startswith(message)


def test_without_the_packages_the_message_is_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(hub_table(4), tmp_path / "a.parquet")
    for package in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    assert "pip install 'flambeau[hf]'" in refusal(path)
    assert "pip install 'flambeau[hf]'" in refusal(Path("hf:peer/photos"))
