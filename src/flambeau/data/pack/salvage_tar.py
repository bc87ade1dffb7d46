"""The samples of a .tar file, past damage.

The format is that of the recipe tar_shards. After damage, reading continues at the next header
whose checksum matches, at any offset: if bytes are missing, headers are no longer at multiples of 512.
"""

import json
import mmap
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from flambeau.data.pack.salvage_records import ScannedRecord
from flambeau.data.sources.folder import IMAGE_SUFFIXES
from flambeau.data.sources.tar_file import LABEL_FILES, json_label
from flambeau.data.sources.tar_masks import mask_in
from flambeau.data.sources.tar_targets import has_targets, is_packed, sample_label
from flambeau.errors import json_object

_BLOCK = 512
_NAME_SIZE = 100
_MAGIC_AT = 257  # of b"ustar", in a header
# As in tar_shards.
_NAME = re.compile(r"(?!__[^/]*__(?:/|$))((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_NOT_ZERO = re.compile(rb"[^\0]")
_NO_FILE = "no plain file, but a link or a sparse file"
_TAIL = 16  # bytes at the end of a file: no image of the usual formats ends in so many zeros


class _Member(NamedTuple):
    at: int  # of its header
    name: str
    content: slice  # of the file's bytes


class Sample(NamedTuple):
    """One of a tar or a zip: `files` by extension; `at`: the offset of its first header, None in a zip."""

    key: str
    at: int | None
    files: dict[str, bytes]

    def images(self) -> list[str]:
        """The extensions of its images, chosen as in `TarSource`."""
        plain = [name for name in self.files if f".{name}" in IMAGE_SUFFIXES]
        return plain or [n for n in self.files if f".{n.rpartition('.')[2]}" in IMAGE_SUFFIXES]

    def label_kind(self) -> str:
        """Where `TarSource` reads its target: in LABEL_FILES, 'mask', 'folder', 'txt', 'targets', or ''."""
        content = _json(self.files)
        if is_packed(content) and "cls" not in self.files:
            return "targets"
        is_json = not has_targets(content) and _json_label(content) is not None
        for kind in LABEL_FILES:
            if kind in self.files and (kind != "json" or is_json):
                return kind
        if mask_in([*self.files]) is not None:
            return "mask"
        if any(folder not in ("", ".") for folder in self.key.split("/")[:-1]):
            return "folder"
        if "txt" in self.files:
            return "txt"
        return "targets" if has_targets(content) else ""


def walk_tar(data: mmap.mmap) -> Iterator[ScannedRecord]:
    return sample_records(lambda read: _samples(data, read))


def sample_records(
    samples: Callable[[Container[str] | None], Iterator[Sample | ScannedRecord]],
) -> Iterator[ScannedRecord]:
    """The images and labels of samples, and the damage among them.

    In a damaged tar, a sample without an image, or without the others' kind of label, has lost it; in an
    undamaged one samples without an image are skipped, as in training.
    """
    kinds: Counter[str] = Counter()
    broken = False
    for sample in samples({"json"}):
        if isinstance(sample, ScannedRecord):
            broken |= not sample.whole
        elif sample.images():
            kinds[sample.label_kind()] += 1
    kind = max(kinds, key=lambda kind: kinds[kind], default="")
    taken: set[str] = set()
    for sample in samples(None):
        if isinstance(sample, ScannedRecord):
            yield sample
        elif sample.key in taken:
            damage = "a sample of this name stands before it"
            yield ScannedRecord(
                _printable(f"sample {sample.key}"), sample.at, damage=damage, whole=not broken
            )
        elif broken or sample.images():
            record = _record(sample, kind)
            yield record._replace(whole=False) if broken else record
            taken.add(sample.key)


def _record(sample: Sample, kind: str) -> ScannedRecord:
    name = _printable(f"sample {sample.key}")
    images = sample.images()
    files = sample.files
    damage = None
    label: int | Tensor | tuple[str, ...] | bytes | None = None
    whole: bool | None = True
    if not images:
        damage = f"no image in it, only .{_printable(', .'.join(files))}"
    elif len(images) > 1:
        damage = f"{len(images)} images in it, .{images[0]} and .{images[1]}"
    elif kind == "cls":
        text = files.get("cls", b"").removeprefix(b"\xef\xbb\xbf").strip()
        if "cls" not in files:
            damage = "no .cls in it, as others have"
        elif not re.fullmatch(rb"\d{1,8}", text):
            damage = f"its .cls is no number of a class: {text[:40]!r}"
            whole = None
        else:
            label = int(text)
    elif kind == "mask":
        mask = mask_in([*files])
        label = None if mask is None else files[mask]
        if label is None:
            damage = "no mask in it, as others have"
    elif kind == "targets":
        label = sample_label(_json(files))
        if label is None:
            damage = "no labels in a .json of it, as others have"
    elif kind == "json" and _json_label(_json(files)) is None:
        damage = "no label in a .json of it, as others have"
        whole = None
    elif kind not in ("", "folder") and kind not in files:
        damage = f"no .{kind} in it, as others have"
    if damage is not None:
        return ScannedRecord(name, sample.at, damage=damage, whole=whole)
    return ScannedRecord(name, sample.at, files[images[0]], label, (sample.key, files))


def _json(files: Mapping[str, bytes]) -> object:
    try:
        return json.loads(files.get("json", b""), object_pairs_hook=json_object)
    except (ValueError, RecursionError):
        return None


def _json_label(values: object) -> int | str | None:
    label = json_label(values)
    return label if isinstance(label, int | str) else None


def _samples(data: mmap.mmap, read: Container[str] | None) -> Iterator[Sample | ScannedRecord]:
    """Files that share a key and are not separated by damage; only extensions in `read` are read."""
    sample = Sample("", 0, {})
    for member in _members(data):
        match = None if isinstance(member, ScannedRecord) else _NAME.fullmatch(member.name)
        if isinstance(member, ScannedRecord):
            if sample.files:
                yield sample
            yield member
            sample = Sample("", 0, {})
        elif match is not None:  # else a folder or a hidden file: no part of a sample
            extension = match[2].lower()
            if match[1] != sample.key or extension in sample.files:
                if sample.files:
                    yield sample
                sample = Sample(match[1], member.at, {})
            wanted = read is None or extension in read
            sample.files[extension] = data[member.content] if wanted else b""
    if sample.files:
        yield sample


def _members(data: mmap.mmap) -> Iterator[_Member | ScannedRecord]:
    """The files, and the damage between them."""
    at = 0
    long_name = None
    behind_damage = False
    last: _Member | None = None  # if it ends right before `at`
    while at < len(data):
        info = _header(data[at : at + _BLOCK])
        if info is None:
            behind = _NOT_ZERO.search(data, at)
            if behind is None:
                break
            follows = _next_header(data, at + 1 if last is None else last.content.start)
            yield from () if last is None else (_before_damage(data, last, at, follows),)
            yield _damage(data, at, behind.start(), follows)
            if follows == len(data):
                return
            at = follows
            last = None
            long_name = None
            behind_damage = True
            continue
        yield from () if last is None else (last,)
        last = None
        start = at + _BLOCK
        size = 0 if info.islnk() or info.issym() or info.isdir() or info.isdev() else info.size
        if start + size > len(data):
            damage = f"cut short: it would end at byte {start + size}"
            yield ScannedRecord(_printable(info.name), at, damage=damage)
            return
        if info.type in b"xXgLK":
            long_name = _long_name(info.type, data[start : start + size]) or long_name
        else:
            name = info.name if long_name is None else long_name
            if behind_damage and _is_short_name(data[at : at + _NAME_SIZE]):
                yield ScannedRecord(
                    _printable(name), at, damage="its whole name lay in the damage before it"
                )
            elif info.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
                last = _Member(at, name, slice(start, start + size))
            elif not info.isdir() and _NAME.fullmatch(name):
                yield ScannedRecord(_printable(name), at, damage=_NO_FILE, whole=True)
            long_name = None
        behind_damage = False
        at = start + -(-size // _BLOCK) * _BLOCK
    yield from () if last is None else (last,)
    if len(data) < at + 2 * _BLOCK:
        what = "the end mark" if at >= len(data) else "half of the end mark"
        yield ScannedRecord("the tar", at, damage=f"cut short: {what} is missing")


def _damage(data: mmap.mmap, at: int, behind: int, follows: int) -> ScannedRecord:
    """Damage in the position of a header; `behind` is the first byte from there that is not zero."""
    what = "a damaged header"
    if behind >= at + _BLOCK:
        what = f"empty blocks, and data behind them from byte {behind}"
    if follows < len(data):
        what += f"; the next header is at byte {follows}"
    return ScannedRecord("the tar", at, damage=what)


def _before_damage(
    data: mmap.mmap, last: _Member, at: int, follows: int
) -> _Member | ScannedRecord:
    """The file that ends where damage begins: good only if the damage cannot extend into it.

    A header inside of it shows that bytes are missing. If its end is empty, empty blocks may belong to it.
    Bytes that are not recognizable as a header may belong to it, too.
    """
    block, content = data[at : at + _BLOCK], data[last.content]
    if follows < at:
        damage = f"bytes of it are missing: another header lies in it at byte {follows}"
    elif not any(block) and not any(content[-_TAIL:]):
        damage = f"its end lies in the empty blocks before byte {at}"
    elif any(block) and block[_MAGIC_AT : _MAGIC_AT + 5] != b"ustar":
        damage = f"what follows it at byte {at} is no header, so bytes of it may be missing or new"
    else:
        return last
    return ScannedRecord(_printable(last.name), last.at, damage=damage)


def _header(block: bytes) -> tarfile.TarInfo | None:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return None
    return info if info.size >= 0 else None


def _next_header(data: mmap.mmap, at: int) -> int:
    """The offset of the next header; the end of the file if there is none."""
    magic_at = at + _MAGIC_AT
    while (magic_at := data.find(b"ustar", magic_at)) >= 0:
        start = magic_at - _MAGIC_AT
        if _header(data[start : start + _BLOCK]):
            return start
        magic_at += 1
    return len(data)


def _is_short_name(field: bytes) -> bool:
    """Whether a header may hold only a part of a name: truncated, or with ? for non-ASCII characters."""
    return b"\0" not in field or b"?" in field


def _long_name(kind: bytes, content: bytes) -> str | None:
    name = None
    if kind == b"L":
        name = content.rstrip(b"\0")
    elif kind in b"xX" and (match := re.search(rb"\d+ path=([^\n]*)\n", content)):
        name = match[1]
    return None if name is None else name.decode(errors="surrogateescape")


def _printable(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()
