"""The commands on Parquet and Arrow files: the run that a folder gives, and messages, no tracebacks."""

import json
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")


def weights(run: Path) -> bytes:
    return (run / "model.safetensors").read_bytes()


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_table_trains_to_the_bits_of_its_folder(
    flambeau: Any, make_images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_images(tmp_path / "images")
    table = f"images.{ending}"
    assert flambeau(f"pack images {table}").code == 0
    options = "--duration 4st --batch-size 4 --precision fp32"
    for data, out, more in (
        ("images", "a", ""),
        (table, "b", ""),
        (table, "c", "--workers 2"),
    ):
        assert flambeau(f"train {data} --out {out} {options} {more}").code == 0
    assert weights(tmp_path / "a") == weights(tmp_path / "b") == weights(tmp_path / "c")
    again = flambeau(f"train {table} --out b {options}")
    assert again.code == 0
    assert "finished" in again.out + again.err
    figures = [json.loads(flambeau(f"evaluate a {data} --json").out) for data in ("images", table)]
    assert figures[0]["loss"] == figures[1]["loss"]
    rows = flambeau(f"predict a {table} --json").out.splitlines()
    assert len(rows) == 16
    assert f"{table}, row 0" in rows[0]


def test_the_data_of_a_run_must_not_change(
    flambeau: Any, make_images: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_images(tmp_path / "images")
    make_images(tmp_path / "others", seed=1)
    assert flambeau("pack images a.parquet").code == 0
    assert flambeau("train a.parquet --out run --duration 4st --batch-size 4").code == 0
    (tmp_path / "a.parquet").unlink()
    assert flambeau("pack others b.parquet").code == 0
    (tmp_path / "b.parquet").rename("a.parquet")
    answer = flambeau("train a.parquet --out run --duration 4st --batch-size 4")
    assert answer.code == 2
    assert "changed" in answer.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PAR1" + bytes(40), ["a.parquet is damaged or cut short"]),
        (b"", ["a.parquet is empty"]),
        (b"version https://git-lfs.github.com/spec/v1\n", ["pointer of Git LFS"]),
    ],
)
def test_what_is_no_table_is_a_message(
    flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_bytes(content)
    for command in ("train a.parquet", "pack a.parquet b.rec"):
        answer = flambeau(command)
        assert answer.code == 2
        assert [word for word in words if word not in answer.err] == []
        assert "Traceback" not in answer.err
    assert flambeau("verify a.parquet").code == 1


def test_tables_without_what_is_needed_are_messages(
    flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"a": [1], "b": ["x"]}), "a.parquet")
    answer = flambeau("train a.parquet")
    assert answer.code == 2
    assert "a.parquet has no column of images (found: a int64, b string)" in answer.err
    verified = flambeau("verify a.parquet")
    assert verified.code == 1
    assert "NOT READ" in verified.out + verified.err


def test_the_folder_of_a_run_is_named_after_the_data_set_of_the_hub() -> None:
    from flambeau.trainer.settings.default_folder import default_folder
    from flambeau.trainer.settings.settings import Settings

    names = ("hf:a/mnist", "mnist"), ("hf:a/mnist:plain", "mnist-plain"), ("a/b:c", "b-c")
    for name, folder in names:
        assert default_folder(Settings(data=name), {"data": name}) == Path("runs") / folder
