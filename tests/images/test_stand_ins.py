"""What stands in the place of images is called by its name, and nothing else is."""

import gzip
import lzma
import os
import zlib
from pathlib import Path

import pytest

from flambeau.errors import UnsupportedImage
from flambeau.images.decode import Picture
from flambeau.images.stand_ins import stand_in, stand_in_at, why_unreadable

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


@pytest.mark.parametrize(
    ("head", "name", "parts"),
    [
        (LFS, "a.rec", ["a pointer of Git LFS", "`git lfs pull`"]),
        (b"/annex/objects/MD5E-s1--0cc1.tar\n", "a.tar", ["git-annex", "`git annex get`"]),
        (b"../../.git/annex/objects/aa/bb/x/x", "a.tar", ["git-annex"]),
        (b"\n<!DOCTYPE html>\n<html>", "a.h5", ["a web page"]),
        (b"<html>", "a.h5", ["a web page"]),
        (gzip.compress(b"x" * 999, mtime=0), "a.tar", ["gzip", "`gzip -dc a.tar > NEW.tar`"]),
        (gzip.compress(b"x" * 999, mtime=0), "a.tar.gz", ["`gzip -dc a.tar.gz > NEW.tar`"]),
        (gzip.compress(b"x" * 999, mtime=0), "a.tgz", ["`gzip -dc a.tgz > NEW.tar`"]),
        (lzma.compress(b"x" * 999), "a.rec", ["`xz -dc a.rec > NEW.rec`"]),
        (zlib.compress(b"x" * 999), "a.tfrecord", ["a zlib stream", "< a.tfrecord > NEW.tfrecord`"]),
        (b"PK\3\4\x14\0", "a.tar", ["a zip archive", "`unzip a.tar`"]),
        (HEIC, "a.jpg", ["a HEIC image", "JPEG or PNG"]),
    ],
)  # fmt: skip
def test_what_is_recognized(head: bytes, name: str, parts: list[str]) -> None:
    words = stand_in(head, Path(name))
    assert words is not None
    for part in parts:
        assert part in words


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"", "a.rec"),
        (b"\x78\x9c" + bytes(40), "a.tfrecord"),  # the length of a record: 40,056 bytes
        (b"PK\3\4\x14\0", "a.npz"),
        (b"PK\3\4\x14\0", "a.pth"),
        (b"/annex/objects/1.png" + bytes(512), "a.tar"),
        (b"BZhang/1.png" + bytes(512), "a.tar"),
        (b"x^2/1.png" + bytes(512), "a.tar"),
        (b"\xff\xd8\xff\xe0", "a.jpg"),
    ],
)
def test_what_is_not(head: bytes, name: str) -> None:
    assert stand_in(head, Path(name)) is None


def test_links_of_git_annex_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a.tar").symlink_to(".git/annex/objects/aa/bb/x/x")
    (tmp_path / "b.tar").symlink_to("elsewhere")
    assert "git-annex" in str(stand_in_at(tmp_path / "a.tar"))
    assert stand_in_at(tmp_path / "b.tar") is None
    for name, words in (("a.tar", "git-annex"), ("b.tar", "no such file or directory")):
        with pytest.raises(FileNotFoundError) as caught:
            os.open(tmp_path / name, os.O_RDONLY)
        assert words in why_unreadable(caught.value)


def test_an_image_that_is_something_else() -> None:
    with pytest.raises(UnsupportedImage, match="this is a pointer of Git LFS"):
        Picture(LFS)
