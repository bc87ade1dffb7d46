"""What is an address, its one spelling, its braces, and what it must not hold."""

from pathlib import Path

import pytest

from flambeau.data.sources.data_names import is_named
from flambeau.data.stores.address import (
    address_of,
    beside,
    expanded,
    is_address,
    name_of,
    without_secrets,
)
from flambeau.errors import InputError


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a.tar", "gs://bucket/x/", "az://box/a.rec", "http://host:80/a.tar",
        "https://host/a-{0..3}.tar", "hf://datasets/me/photos/a.tar", "file:///data/a.tar",
    ],
)  # fmt: skip
def test_an_address_survives_being_a_path(text: str) -> None:
    assert is_address(text)
    assert is_address(Path(text))
    assert not is_named(text)
    assert not is_named(Path(text))
    assert address_of(text) == text
    assert address_of(Path(text)).rstrip("/") == text.rstrip("/")


@pytest.mark.parametrize(
    "text",
    [
        "photos",
        "/data/s3/a.tar",
        "hf:mnist",
        "hf:me/photos",
        "hf:/home/me/photos",
        "torchvision:cifar10",
        "a.py:make",
        "s3:x",
    ],
)
def test_paths_and_names_are_no_addresses(text: str) -> None:
    assert not is_address(text)
    assert not is_address(Path(text))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:hunter2@host/a.tar", "https://host/a.tar"),
        ("s3://key:hunter2@bucket/a.tar", "s3://bucket/a.tar"),
        ("https://host/a.tar?sig=hunter2", "https://host/a.tar"),
        ("https://host/a.tar#hunter2", "https://host/a.tar"),
    ],
)
def test_secrets_are_refused_and_not_repeated(address: str, shown: str) -> None:
    with pytest.raises(InputError) as caught:
        address_of(address)
    assert shown in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in without_secrets(f"no answer of '{address}' at all")


@pytest.mark.parametrize("address", ["s3://b/x//y.tar", "https://host/../a.tar", "s3://b/./a.tar"])
def test_a_path_that_another_spelling_would_change_is_refused(address: str) -> None:
    with pytest.raises(InputError, match=r"empty part"):
        address_of(address)


def test_braces_keep_their_zeros_and_their_order() -> None:
    assert expanded("s3://b/a.tar") == ["s3://b/a.tar"]
    assert expanded("s3://b/p-{098..101}.tar") == [
        f"s3://b/p-{n}.tar" for n in ("098", "099", "100", "101")
    ]
    assert expanded("s3://b/p-{9..11}.tar") == [f"s3://b/p-{n}.tar" for n in (9, 10, 11)]
    assert expanded("s3://b/{x,y}/p-{0..1}.tar") == [
        f"s3://b/{f}/p-{n}.tar" for f in "xy" for n in range(2)
    ]


@pytest.mark.parametrize(
    "braces", ["{3..1}", "{}", "{0..9999999}", "{0..999}{0..9999}", "{0..2", "0..2}", "{a{b,c}}"]
)
def test_braces_that_are_no_range_are_refused(braces: str) -> None:
    with pytest.raises(InputError, match=r"s3://b/p-"):
        expanded(f"s3://b/p-{braces}.tar")


def test_names_and_neighbours() -> None:
    assert name_of("https://host/2024/a.tar") == "a.tar"
    assert name_of("s3://bucket/a.tar") == "a.tar"
    assert beside("s3://bucket/x/a.tar", "b.txt") == "s3://bucket/x/b.txt"
