"""`flambeau pack` and `flambeau verify FILE`, as they are typed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flambeau.data.sources.open_data import open_parts
from flambeau.images.native import kernel
from flambeau.recipes.data.recordio import RecordReader, unpack
from refused import refused


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tree(root: str | Path) -> dict[str, bytes]:
    root = Path(root)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_folder_becomes_a_file_that_trains(flambeau: Any, images: Path) -> None:
    answer = flambeau("pack", images, "packed.rec")
    assert answer == (
        0,
        "24 images in 2 files, packed_train.rec ... packed_val.rec\n"
        "next: flambeau verify packed_train.rec\n",
        "",
    )
    assert flambeau("verify packed_train.rec").code == 0
    settings = "--duration 2st --batch-size 4 --precision fp32"
    assert flambeau("train packed_train.rec --out run", settings).code == 0
    answer = flambeau("evaluate run packed_val.rec --json")
    assert json.loads(answer.out)["images"] == 8
    again = flambeau("pack", images, "packed.rec")
    assert again.out.startswith("already packed: 24 images")


def test_what_is_next_can_be_copied_to_a_shell(flambeau: Any, images: Path) -> None:
    """Also with a space in the name."""
    packed = flambeau("pack", images, Path("my photos.rec"))
    assert packed.out.endswith("next: flambeau verify 'my photos_train.rec'\n")
    short = "--duration 2st --batch-size 4 --precision fp32"
    data, folder = Path("my photos_train.rec"), Path("my run")
    trained = flambeau("train", data, "--out", folder, short)
    for line in ("predict 'my run' IMAGE...", "evaluate 'my run' DATA", "verify 'my run'\n"):
        assert f"flambeau {line}" in trained.out


def test_segments_without_the_kernel(
    flambeau: Any, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "kernel", lambda: None)
    refused(flambeau("pack", photos, "a.rec --segments"), "--segments needs", "C kernel", "wheel")
    assert not list(Path().glob("a.rec*"))


def test_resized_jpegs_by_default(flambeau: Any, photos: Path) -> None:
    assert flambeau("pack", photos, "a.rec --resize 40").code == 0
    for record in RecordReader("a.rec"):
        path = Path("one.jpg")
        path.write_bytes(unpack(record)[1])
        with Image.open(path) as image:
            assert (image.format, min(image.size)) == ("JPEG", 40)
    assert flambeau("pack", photos, "b.npy --resize 40 --square --workers 3").code == 0
    assert np.load("b.npy").shape == (18, 40, 40, 3)
    assert flambeau("pack", photos, "c.npz --encode keep").code == 0
    with np.load("c.npz") as arrays:
        assert len(arrays["offsets"]) == 19


def test_lists(flambeau: Any, photos: Path) -> None:
    answer = flambeau("pack", photos, "all --list --train-ratio 0.5 --no-shuffle")
    assert answer.out == "9 images: all_train.lst\n9 images: all_val.lst\n"
    first = Path("all_train.lst").read_text(encoding="utf-8").splitlines()[0]
    assert first == "0\t0.000000\tphotos/ant/0.jpg"
    refused(flambeau("pack", photos, "all --list --train-ratio 0.5"), "all_train.lst exists")
    assert flambeau("pack", photos, "whole.lst --list").out == "18 images: whole.lst\n"
    assert flambeau("pack whole.lst a.tar").out.startswith("18 images in a.tar")
    refused(flambeau("pack a.tar b --list"), "--list is for a folder of images")
    for name in ("all", "whole"):
        assert Path(f"{name}.classes.txt").read_text(encoding="utf-8") == "ant\nbee\ncat\n"
    train, val = open_parts(Path("all_train.lst"))
    assert val is not None
    assert (train.classes, len(train), len(val)) == (("ant", "bee", "cat"), 9, 9)
    Path("other.classes.txt").write_text("b\na\n", encoding="utf-8")
    refused(flambeau("pack", photos, "other --list"), "other.classes.txt exists and names other")
    assert not Path("other.lst").exists()


def test_ratios_chunks_and_shards(flambeau: Any, photos: Path) -> None:
    Path("out").mkdir()
    assert flambeau("pack", photos, "out/a.rec --train-ratio 0.5 --test-ratio 0.25").code == 0
    sizes = {path.stem: len(RecordReader(path)) for path in sorted(Path("out").glob("*.rec"))}
    assert sizes == {"a_train": 9, "a_val": 5, "a_test": 4}
    labels = [unpack(record)[0].label for record in RecordReader("out/a_train.rec")]
    assert labels != sorted(labels)  # shuffled, or the training part had the first classes alone
    assert flambeau("pack", photos, "out/b.rec --chunks 2 --no-shuffle").code == 0
    assert [len(RecordReader(f"out/b_{k}.rec")) for k in range(2)] == [9, 9]
    assert flambeau("pack", photos, "out/c.rec --shards 3").code == 0
    assert flambeau("verify out").code == 0


def test_bad_images_are_listed(flambeau: Any, photos: Path) -> None:
    (photos / "bee" / "2.jpg").write_bytes(b"no image")
    refused(flambeau("pack", photos, "a.rec"), "bee/2.jpg: not a JPEG", "--skip-bad-images")
    answer = flambeau("pack", photos, "a.rec --skip-bad-images 1")
    assert answer.out.startswith("17 images in a.rec, 1 left out\n")
    assert "left out: " in answer.err
    assert "bee/2.jpg: not a JPEG" in answer.err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("photos a.rec --resize 0", ["--resize must be at least 1, got 0"]),
        ("photos a.rec --quality 101", ["--quality must be from 1 to 100"]),
        ("photos a.rec --quality 90 --encode png", ["--quality is for JPEG and WebP"]),
        ("photos a.rec --encode keep --resize 9", ["--encode keep leaves images as they are"]),
        ("photos a.rec --encode gif", ["--encode"]),
        ("photos a.rec --workers 0", ["--workers must be at least 1"]),
        ("photos a.7z", ["nothing can be packed into .7z"]),
        ("photo a.rec", ["photo does not exist; did you mean photos?"]),
        ("photos a.npy", ["an array holds images of one size", "--center-crop"]),
        ("photos a.rec --seed 3", ["--seed has no effect without --shuffle: leave it out"]),
        (
            "photos a.rec --shards 2 --seed 3 --no-shuffle",
            ["--seed has no effect with --no-shuffle"],
        ),
        ("photos a.rec --shuffle --seed -3", ["--seed must be at least 0, got -3"]),
        ("photos a --shuffle", ["--shuffle has no effect on a, whose order is that of its names"]),
        ("photos a.lmdb --shuffle --seed 3", ["--shuffle has no effect on a.lmdb"]),
        (
            "photos a.rec --download",
            ["--download has no effect without torchvision:NAME or hf:NAME"],
        ),
        ("photos a --list --workers 3", ["--workers has no effect with --list: leave it out"]),
        ("photos a --list --resize 9", ["--resize has no effect with --list: leave it out"]),
        ("photos", ["DST"]),
    ],
)
def test_mistakes(words: str, parts: list[str], flambeau: Any, photos: Path) -> None:
    refused(flambeau("pack", words), *parts)
    assert {path.name for path in Path().iterdir()} == {"photos"}


def test_verify_names_and_saves(flambeau: Any, photos: Path) -> None:
    assert flambeau("pack", photos, "a.rec").code == 0
    data = bytearray(Path("a.rec").read_bytes())
    offset = int(Path("a.idx").read_text().splitlines()[4].split("\t")[1])
    data[offset + 400] ^= 1
    Path("a.rec").write_bytes(data)
    answer = flambeau("verify a.rec --salvage b.rec")
    assert answer == (
        1,
        f"a.rec, record 4 (key 4), byte {offset}: its bytes or its class are not what was packed\n"
        "a.rec: DAMAGED in 1 place; 17 images are good\nthey are in b.rec\n",
        "",
    )
    assert flambeau("verify b.rec --deep") == (
        0, "b.rec: 17 images, all whole (pixels decoded, no checksums in this format)\n", "",
    )  # fmt: skip
    assert Path("b.classes.txt").read_text() == "ant\nbee\ncat\n"
    facts = json.loads(flambeau("verify a.rec --json").out)
    assert (facts["good"], facts["format"], facts["damaged"][0]["offset"]) == (17, "rec", offset)
    refused(flambeau("verify a.rec --salvage b.rec"), "b.rec exists")
    refused(flambeau("verify a.rec --salvage b.tar"), "is of another format")
    refused(flambeau("verify none.rec"), "none.rec does not exist")
    refused(
        flambeau("verify none"),
        "none does not exist",
        "Give the folder of a run, packed images, or",
    )
    assert flambeau("verify", photos).code == 0


def test_verify_shows_the_first_of_many_damages(flambeau: Any, photos: Path) -> None:
    assert flambeau("pack", photos, "a.rec").code == 0
    data = bytearray(Path("a.rec").read_bytes())
    offsets = [int(line.split("\t")[1]) for line in Path("a.idx").read_text().splitlines()]
    for offset in offsets:
        data[offset + 400] ^= 1
    Path("a.rec").write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flambeau.cli.verify._SHOWN", 5)
        code, out, _ = flambeau("verify a.rec")
    assert code == 1
    assert len(out.splitlines()) == 6
    assert f"DAMAGED in {len(offsets)} places, of which the first 5 are shown (--json lists" in out
    assert len(json.loads(flambeau("verify a.rec --json").out)["damaged"]) == len(offsets)


@pytest.mark.slow  # three processes that load torch; tests/data/pack/test_pack.py kills faster
def test_killed_and_started_again(photos: Path) -> None:
    """The real command, in a process that is killed while it works: the bytes of one that never was."""
    words = ["--resize", "50", "--shards", "6", "--workers", "2"]
    command = [sys.executable, "-m", "flambeau", "pack", str(photos)]
    Path("whole").mkdir()
    Path("out").mkdir()
    subprocess.run([*command, "whole/a.tar", *words], check=True, capture_output=True)
    staging = Path("out/.a.tar.packing")
    process = subprocess.Popen([*command, "out/a.tar", *words], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not any(path.is_dir() for path in staging.glob("*")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not list(Path("out").glob("*.tar")) or process.returncode == 0
    subprocess.run([*command, "out/a.tar", *words], check=True, capture_output=True)
    assert tree("out") == tree("whole")
