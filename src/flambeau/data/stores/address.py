"""Addresses of objects in a store, such as s3://bucket/photos-{00000..00127}.tar.

Parts of the project hand DATA around as a `Path`, which writes s3://bucket as s3:/bucket; both are understood
here, and `address_of` gives the one spelling.
"""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from flambeau.errors import InputError

SCHEMES = ("s3", "gs", "az", "http", "https", "hf", "file")
"""What an address begins with."""

WRITABLE = ("s3", "gs", "az", "file")
"""What an address begins with where something can be written."""

MOST_OBJECTS = 1_000_000
"""Of one address with braces; a slip of the keyboard must not fill the memory."""

_OTHERS = "|".join(scheme for scheme in SCHEMES if scheme != "hf")
# hf:/home/me/data is a name of Hugging Face: a folder of this disk.
_ADDRESS = re.compile(rf"({_OTHERS}):/{{1,3}}(?=[^/])|(hf):(?://(?=[^/])|/(?=datasets/))")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def is_address(data: str | Path) -> bool:
    """Whether DATA is an address of a store, no path and no name.

    Example:
        >>> is_address("s3://bucket/a.tar"), is_address(Path("s3://bucket/a.tar")), is_address("hf:mnist")
        (True, True, False)
        >>> is_address(Path("hf://datasets/me/a.tar")), is_address("hf:/home/me/data")
        (True, False)
    """
    return _ADDRESS.match(str(data)) is not None


def address_of(data: str | Path) -> str:
    """The one spelling of an address.

    Raises:
        InputError: a password or query, which would be written into a run folder; or two slashes in a row.

    Example:
        >>> address_of(Path("s3://bucket/a.tar")), address_of("file:///tmp/a.tar")
        ('s3://bucket/a.tar', 'file:///tmp/a.tar')
    """
    text = str(data)
    match = _ADDRESS.match(text)
    assert match is not None  # asked for addresses alone
    scheme = match[1] or match[2]
    rest = text[match.end() :]
    address = f"file:///{rest}" if scheme == "file" else f"{scheme}://{rest}"
    host = rest.partition("/")[0]
    if "@" in host and scheme != "hf":
        raise InputError(
            f"{without_secrets(address)}: the address holds a user name or a password, which would be "
            "written into the folder of the run\nLeave it out, and keep it where the store's own programs "
            "look: ~/.netrc, ~/.aws/credentials or the environment"
        )
    if scheme in ("http", "https") and ("?" in rest or "#" in rest):
        raise InputError(
            f"{without_secrets(address)}: the address has a query behind ?, which may be a signature and "
            "would be written into the folder of the run\nGive the address without it, and "
            "the password in ~/.netrc"
        )
    if "//" in rest.rstrip("/") or {".", ".."} & {*rest.split("/")}:
        raise InputError(
            f"{address} has an empty part, . or .. in its path\nGive objects names without them"
        )
    return address


def mirror_address(address: str) -> str:
    """The one spelling of the address of a mirror; InputError if nothing can be written there.

    Example:
        >>> mirror_address("s3://bucket/runs/a/")
        's3://bucket/runs/a'
    """
    if not is_address(address) or address.partition(":")[0] not in WRITABLE:
        known = ", ".join(f"{scheme}://" for scheme in WRITABLE)
        raise InputError(
            f"mirror = {address!r} is no address that can be written\nName one that begins with {known}"
        )
    return address_of(address).rstrip("/")


def without_secrets(text: str) -> str:
    """A text with no password and no query in any address, for messages.

    Example:
        >>> without_secrets("https://me:secret@host/a.tar?sig=1 is gone")
        'https://host/a.tar is gone'
    """
    text = re.sub(r"(\w+://)[^/\s@'\"]+@", r"\1", text)
    return re.sub(r"(https?://[^\s?#'\"]*)[?#][^\s'\"]*", r"\1", text)


def name_of(address: str) -> str:
    """The last part of an address: the name of the object.

    Example:
        >>> name_of("s3://bucket/2024/a.tar")
        'a.tar'
    """
    return PurePosixPath(urlsplit(address).path).name


def folder_of(address: str) -> str:
    """An address without its last part, with its last slash."""
    return address.rstrip("/").rpartition("/")[0] + "/"


def beside(address: str, name: str) -> str:
    """The address of an object in the same folder."""
    return folder_of(address) + name


def expanded(address: str) -> list[str]:
    """All addresses of one with braces: {a,b}, and {000..127}, whose zeros are kept.

    Raises:
        InputError: braces that are neither, or more than a million addresses.

    Example:
        >>> expanded("s3://b/{train,val}-{08..10}.tar")[:4]
        ['s3://b/train-08.tar', 's3://b/train-09.tar', 's3://b/train-10.tar', 's3://b/val-08.tar']
    """
    pieces = _BRACES.split(address)
    choices: list[Sequence[str]] = []
    count = 1
    for at, piece in enumerate(pieces):
        choices.append([piece] if at % 2 == 0 else _choices(piece, address))
        count *= len(choices[-1])
        if count > MOST_OBJECTS:
            raise InputError(f"{address} stands for more than {MOST_OBJECTS:,} objects")
    if any("{" in piece or "}" in piece for piece in pieces[::2]):
        raise InputError(f"{address}: a brace is not closed, or lies within another one")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _choices(inside: str, address: str) -> Sequence[str]:
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        words = inside.split(",")
        if len(words) < 2:
            raise InputError(
                f"{address}: {{{inside}}} is no range\nWrite {{00000..00127}}, or {{train,val}}"
            )
        return words
    first, last = numbers.groups()
    low, high = int(first), int(last)
    if high < low or high - low >= MOST_OBJECTS:
        raise InputError(
            f"{address}: {{{inside}}} counts down or stands for too many objects\n"
            "Write the smaller number first, such as {00000..00127}"
        )
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    return [str(number).zfill(width) for number in range(low, high + 1)]
