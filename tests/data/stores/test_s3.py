"""A real S3, moto's server on loopback: from `pack --shards` to a training, and what it refuses."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.sources.open_data import open_parts, open_sources
from flambeau.data.stores import store as stores
from flambeau.data.stores.block_cache import CacheOptions
from flambeau.data.stores.store import Missing, Retries, Store, StoreFault
from flambeau.errors import InputError


@pytest.fixture(autouse=True)
def _here(s3: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/cache")
    monkeypatch.setattr(stores, "DEFAULT_RETRIES", Retries(0.01, 0.05, 1.0))
    monkeypatch.setattr(stores, "_processes", {})
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def bucket(s3: Any, tmp_path: Path, flambeau: Any) -> Iterator[str]:
    """Shards of each kind, uploaded as they are; the files stay in packed/."""
    for number, name in enumerate(("cat", "dog")):
        Path("photos", name).mkdir(parents=True)
        for image in range(12):
            pixels = np.random.default_rng(50 * number + image).integers(
                0, 256, (36, 40, 3), np.uint8
            )
            Image.fromarray(pixels).save(Path("photos", name, f"{image}.png"))
    s3.create_bucket(Bucket="photos")
    for kind in ("tar", "rec", "tfrecord"):
        Path("packed", kind).mkdir(parents=True)
        assert flambeau("pack photos", f"packed/{kind}/pets.{kind} --shards 2").code == 0
        for path in Path("packed", kind).iterdir():
            s3.upload_file(f"{path}", "photos", f"{kind}/{path.name}")
    yield "photos"
    for one in s3.list_objects_v2(Bucket="photos").get("Contents", []):
        s3.delete_object(Bucket="photos", Key=one["Key"])
    s3.delete_bucket(Bucket="photos")


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("tar", "pets.tar"),
        ("rec", "pets-{00000..00001}-of-00002.rec"),
        ("tfrecord", ""),
        ("tar", "pets-*.tar"),
    ],
)
def test_every_sample_is_that_of_the_disk(bucket: str, kind: str, form: str) -> None:
    near = open_sources(Path(f"packed/{kind}/pets.{kind}"))
    far = open_sources(Path(f"s3://{bucket}/{kind}/{form}"))
    for one, other in zip(far, near, strict=True):
        assert one.fingerprint == other.fingerprint
        assert list(one.names) == list(other.names)
        assert torch.equal(one.labels, other.labels)
        assert [one.read(at) for at in range(len(one))] == [
            other.read(at) for at in range(len(other))
        ]


def test_shards_without_an_index(bucket: str, s3: Any) -> None:
    s3.delete_object(Bucket=bucket, Key="tar/pets.tar.flambeau-shards")
    near = open_parts(Path("packed/tar/pets.tar"))[0]
    far = open_parts(Path(f"s3://{bucket}/tar/pets.tar"))[0]
    assert far.fingerprint == near.fingerprint
    assert [far.read(at) for at in range(len(far))] == [near.read(at) for at in range(len(near))]


def test_a_training(bucket: str, flambeau: Any) -> None:
    how = "--image-size 32 --model small_convnet --epochs 1 --device cpu"
    answer = flambeau("train", f"s3://{bucket}/tar/pets.tar", "--out far", how)
    assert answer.code == 0, answer.err
    assert flambeau("train packed/tar/pets.tar --out near", how).code == 0
    assert Path("far/model.safetensors").read_bytes() == Path("near/model.safetensors").read_bytes()
    for path in Path("far").rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes()
    answer = flambeau("evaluate far", f"s3://{bucket}/tar/pets.tar --all")
    assert answer.code == 0, answer.err


def test_an_object_that_changes(bucket: str, s3: Any) -> None:
    source = open_parts(Path(f"s3://{bucket}/tar/pets.tar"))[0]
    data = bytearray(Path("packed/tar/pets-00000-of-00002.tar").read_bytes())
    at = data.index(b"IDAT") + 9
    data[at] ^= 1
    s3.put_object(Bucket=bucket, Key="tar/pets-00000-of-00002.tar", Body=bytes(data))
    with pytest.raises(StoreFault, match=r"its bytes are not those that s3://photos/tar/pets\.tar"):
        [source.read(at) for at in range(len(source))]
    facts = Store().facts(f"s3://{bucket}/tar/pets-00000-of-00002.tar")
    assert facts.size == len(data)
    assert facts.version


def test_what_is_not_there(bucket: str) -> None:
    with pytest.raises(Missing, match=r"s3://photos/tar/gone\.tar is not there"):
        open_sources(Path(f"s3://{bucket}/tar/gone.tar"))
    with pytest.raises(InputError, match=r"no-such-bucket"):
        open_sources(Path("s3://no-such-bucket/gone.tar"))


def test_no_credentials(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", f"{tmp_path}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreFault, match=r"access is denied.*\nGive credentials"):
        open_sources(Path(f"s3://{bucket}/tar/pets.tar"))


def test_a_cache_is_that_of_the_content(bucket: str, tmp_path: Path) -> None:
    """The same shards at another address are not fetched again."""
    cache = CacheOptions(tmp_path / "both")
    far = open_parts(Path(f"s3://{bucket}/tar/pets.tar"), cache=cache)[0]
    data = [far.read(at) for at in range(len(far))]
    shutil.copytree("packed/tar", "moved")
    for path in Path("moved").glob("*.tar"):
        path.write_bytes(bytes(path.stat().st_size))
    again = open_parts(Path(f"file://{tmp_path}/moved/pets.tar"), cache=cache)[0]
    assert [again.read(at) for at in range(len(again))] == data
