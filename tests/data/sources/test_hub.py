"""hf://datasets/...: shards on a hub, read by the client of Hugging Face, against those on the disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flambeau.cli.command import main
from flambeau.data.sources.open_data import open_sources
from flambeau.data.stores.block_cache import CacheOptions
from flambeau.data.stores.store import Denied, Missing
from hub_server import COMMIT, Hub, hub_of
from same_sources import png, same

pytest.importorskip("huggingface_hub")

NAME = "me/pets"
TOKEN = "hf_secret"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set as it lies on a hub: shards of two formats, each in a folder of its own."""
    photos = tmp_path_factory.mktemp("photos")
    for number, name in enumerate(("cat", "dog")):
        (photos / name).mkdir()
        for image in range(11):
            (photos / name / f"{image:03}.png").write_bytes(png(100 * number + image))
    folder = tmp_path_factory.mktemp("shards")
    for kind in ("tar", "parquet"):
        (folder / kind).mkdir()
        assert main(["pack", f"{photos}", f"{folder / kind}/pets.{kind}", "--shards", "3"]) == 0
    return folder


@pytest.fixture(scope="module")
def hub(shards: Path) -> Iterator[Hub]:
    """One for all tests, because the client of a process keeps the place of the hub."""
    with hub_of(shards, NAME, token=TOKEN) as serves, pytest.MonkeyPatch.context() as patch:
        # Read from the environment when the client is imported, which an earlier test may have done.
        patch.setattr("huggingface_hub.constants.ENDPOINT", serves.url)
        template = f"{serves.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setenv("HF_TOKEN", TOKEN)
        yield serves


@pytest.fixture(autouse=True)
def _no_requests_yet(hub: Hub) -> None:
    hub.requests.clear()


@pytest.mark.parametrize("form", ["pets.{}", "pets-*.{}", "pets-{{00000..00002}}-of-00003.{}"])
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_shards_are_the_same_as_on_the_disk(
    hub: Hub, shards: Path, tmp_path: Path, kind: str, form: str
) -> None:
    near = open_sources(shards / kind / f"pets.{kind}")
    address = Path(f"hf://datasets/{NAME}/{kind}/{form.format(kind)}")
    far = open_sources(address, cache=CacheOptions(tmp_path / "cache"))
    for one, other in zip(far, near, strict=True):
        same(one, other)
    assert any(part is not None for _, path, part in hub.requests if "/resolve/" in path)


def test_a_revision_is_the_one_that_is_read(hub: Hub, shards: Path, tmp_path: Path) -> None:
    address = Path(f"hf://datasets/{NAME}@{COMMIT}/tar/pets.tar")
    far = open_sources(address, cache=CacheOptions(tmp_path / "cache"))
    for one, other in zip(far, open_sources(shards / "tar" / "pets.tar"), strict=True):
        same(one, other)
    read = [path for _, path, _ in hub.requests if "/resolve/" in path]
    assert read
    assert all(f"/resolve/{COMMIT}/" in path for path in read)


@pytest.mark.parametrize(
    ("address", "token", "error"),
    [
        ("hf://datasets/you/pets/pets.tar", TOKEN, Missing),
        (f"hf://datasets/{NAME}/tar/dogs.tar", TOKEN, Missing),
        (f"hf://datasets/{NAME}/tar/pets.tar", "hf_other", Denied),
    ],
    ids=["no data set", "no file", "not for this token"],
)
def test_what_cannot_be_read_is_named(
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    address: str,
    token: str,
    error: type[Exception],
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(error) as raised:
        open_sources(Path(address), cache=CacheOptions(tmp_path / "cache"))
    assert address in str(raised.value)
    assert token not in str(raised.value)
