"""What files look like that are not what their names say; each is made by the tool that the format is of."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from flambeau.file_signature import STAND_INS, signature


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a", b"x")
    return buffer.getvalue()


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(__file__, "a")
    return buffer.getvalue()


def _npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ones(2))
    return buffer.getvalue()


def _legacy() -> bytes:
    buffer = io.BytesIO()
    torch.save({}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _hdf5() -> bytes:
    buffer = io.BytesIO()
    with pytest.importorskip("h5py").File(buffer, "w") as file:
        file["a"] = 1
    return buffer.getvalue()


FILES: dict[str, Callable[[], bytes]] = {
    "empty": bytes,
    "git-lfs": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n",
    "git-annex": lambda: b"/annex/objects/MD5E-s5--4d7a.pth\n",
    "web page": lambda: b"\r\n<!DOCTYPE html><html></html>",
    "svg": lambda: b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>',
    "gzip": lambda: gzip.compress(b"x"),
    "bzip2": lambda: bz2.compress(b"x"),
    "xz": lambda: lzma.compress(b"x"),
    "zip": _zip,
    "tar": _tar,
    "npy": _npy,
    "hdf5": _hdf5,
    "torch": _legacy,
    "pickle": lambda: pickle.dumps({}),
    "safetensors": lambda: safetensors.torch.save({"w": torch.ones(2)}),
    # As torch.onnx.export writes it: ir_version 10, producer_name 'pytorch', producer_version.
    "onnx": lambda: b"\x08\x0a\x12\x07pytorch\x1a\x062.15.0:\x05\x0a\x03abc",
    "json": lambda: json.dumps({"error": "no such model"}).encode(),
    "text": lambda: b"Entry not found",
    "zeros": lambda: bytes(100),
}


@pytest.mark.parametrize("kind", FILES)
def test_kinds(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.pth"
    path.write_bytes(FILES[kind]())
    found = signature(path)
    assert found is not None
    assert found.kind == kind
    assert found.sentence.startswith("a")


def test_a_text_is_quoted_and_cut_characters_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    path.write_text("\nnot found: \u4e2d" + "\u6587" * 3000, encoding="utf-8")
    found = signature(path)
    assert found is not None
    assert found.what == f"a text that begins with 'not found: \u4e2d{chr(0x6587) * 48}'"


@pytest.mark.parametrize(
    "data", [bytes(100) + b"\x08", b"\x08", b"\x08\x09", b"\xffabc", b"a\x1b[2K", b"\x12"]
)
def test_bytes_that_say_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a").write_bytes(data)
    assert signature(tmp_path / "a") is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    """Which would wait for ever for somebody to write."""
    os.mkfifo(tmp_path / "a.png")
    assert signature(tmp_path / "a.png") is None


def test_a_link_of_git_annex_to_what_is_not_here(tmp_path: Path) -> None:
    link = tmp_path / "a.pth"
    link.symlink_to("../.git/annex/objects/3X/jG/MD5E-s5--4d7a.pth/MD5E-s5--4d7a.pth")
    found = signature(link)
    assert found is not None
    assert found.kind == "git-annex"
    assert found.kind in STAND_INS
    (tmp_path / "b").symlink_to("nowhere")
    assert signature(tmp_path / "b") is None
