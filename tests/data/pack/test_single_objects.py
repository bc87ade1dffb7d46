"""`flambeau pack` of images that are objects of their own in a store: what the copy on a disk would give."""

import gc
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flambeau.cli.command import main
from flambeau.data.sources.open_data import open_parts, open_source
from flambeau.data.sources.open_store import SingleObjects
from flambeau.errors import InputError
from object_server import Fault, ObjectServer, Request, serving
from same_sources import mask_png, png

COUNT = 12


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Class folders, tables of their files, and the same divided into train and val."""
    folder = tmp_path / "bucket"
    rows = []
    for number in range(COUNT):
        name = f"pets/{('cat', 'dog')[number % 2]}/{number:02}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(number))
        rows.append((name, ("cat", "dog")[number % 2]))
    (folder / "labels.csv").write_text("\n".join(map(",".join, [("path", "label"), *rows])))
    table = {"image": [name for name, _ in rows], "label": [label for _, label in rows]}
    pq.write_table(pa.table(table), folder / "names.parquet")
    for part in ("train", "val"):
        shutil.copytree(folder / "pets", folder / "divided" / part)
    return folder


@pytest.fixture
def server(store: Path) -> Iterator[ObjectServer]:
    with serving(store, lists=True) as serves:
        yield serves


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/cache")


def bytes_of(pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path().glob(pattern))]


@pytest.mark.parametrize("name", ["pets", "pets/", "labels.csv", "divided"])
def test_the_shards_are_those_of_a_copy_on_the_disk(
    server: ObjectServer, store: Path, name: str
) -> None:
    assert main(["pack", f"{store}/{name}", "near.tar", "--shards", "2"]) == 0
    assert main(["pack", f"{server.url}/{name}", "far.tar", "--shards", "2"]) == 0
    near, far = bytes_of("near*.tar"), bytes_of("far*.tar")
    assert len(near) == 2 + 2 * (name == "divided")
    assert far == near
    assert bytes_of("far*.classes.txt") == bytes_of("near*.classes.txt")
    gc.collect()  # of a table the source lies in a cycle until then, or until the command ends
    assert not list(Path("cache/tmp").iterdir())


def test_a_table_needs_no_list_and_names_what_it_likes(
    server: ObjectServer, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """URLs, and images above its folder."""
    (store / "tables").mkdir()
    rows = ["url,label", f"{server.url}/pets/cat/00.png,cat", "../pets/dog/01.png,dog"]
    (store / "tables" / "a.csv").write_text("\n".join(rows))
    server.lists = False
    assert main(["pack", f"{server.url}/tables/a.csv", "a.tar"]) == 0
    packed = open_parts(Path("a.tar"))[0]
    assert [packed.read(at) for at in range(2)] == [png(0), png(1)]
    assert packed.classes == ("cat", "dog")


def test_a_parquet_file_of_names(server: ObjectServer) -> None:
    assert main(["pack", f"{server.url}/names.parquet", "a.tar"]) == 0
    packed = open_source(Path("a.tar"), ("cat", "dog"))
    assert [packed.read(at) for at in range(COUNT)] == [png(at) for at in range(COUNT)]


def test_images_are_asked_for_at_the_same_time(server: ObjectServer) -> None:
    together = threading.Barrier(COUNT)

    def all_there(request: Request) -> None:
        if request.method == "GET" and request.name.endswith(".png"):
            together.wait(
                60
            )  # an error in the server, and no answer, if one after the other is asked for

    server.fault = all_there
    assert main(["pack", f"{server.url}/labels.csv", "a.tar", "--workers", "1"]) == 0
    assert not together.broken


@pytest.mark.parametrize("name", ["labels.csv", "names.parquet", "pets", "divided/"])
def test_a_training_is_refused_with_a_command_that_works(store: Path, name: str) -> None:
    with pytest.raises(SingleObjects, match=r"s images one by one, and a training would") as caught:
        open_parts(Path(f"file://{store}/{name}"))
    command = shlex.split(str(caught.value).rpartition("what it makes: ")[2])
    assert command[:2] == ["flambeau", "pack"]
    goal = command[3].replace("divided.tar", "divided_train.tar")
    command[command.index("16")] = "2"  # there are 12 images
    assert main(command[1:]) == 0
    assert sum((part is not None and len(part)) or 0 for part in open_parts(Path(goal))) in (12, 24)


def test_where_nothing_can_be_written_the_command_names_a_file_of_the_disk(
    server: ObjectServer,
) -> None:
    with pytest.raises(
        SingleObjects, match=r"pack http://127.*/labels\.csv labels\.tar --shards 16"
    ):
        open_parts(Path(f"{server.url}/labels.csv"))


def test_a_local_parquet_file_of_names_is_refused_with_a_command_that_works(store: Path) -> None:
    with pytest.raises(InputError, match="names image files, and does not hold") as caught:
        open_parts(store / "names.parquet")
    python, option, code = shlex.split(str(caught.value).rpartition("name that: ")[2])
    assert (python, option) == ("python", "-c")
    exec(code)
    assert open_parts(store / "names.csv")[0].classes == ("cat", "dog")


def test_what_is_missing_is_a_bad_image_by_its_address(
    server: ObjectServer, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / "pets/dog/03.png").unlink()
    assert main(["pack", f"{server.url}/labels.csv", "a.tar"]) == 2
    error = capsys.readouterr().err
    assert f"{server.url}/pets/dog/03.png ({server.url}/labels.csv, line 5)" in error
    assert main(["pack", f"{server.url}/labels.csv", "a.tar", "--skip-bad-images", "1"]) == 0
    assert len(open_parts(Path("a.tar"))[0]) == COUNT - 1


@pytest.mark.parametrize("secret", ["{}", "file://{}", "../../..{}"])
def test_a_table_of_a_server_reads_no_file_of_this_machine(
    server: ObjectServer, store: Path, tmp_path: Path, secret: str
) -> None:
    mine = tmp_path / "mine.png"
    mine.write_bytes(png(99))
    (store / "b.csv").write_text(f"path,label\n{secret.format(mine)},a\npets/dog/01.png,b\n")
    assert main(["pack", f"{server.url}/b.csv", "b.tar", "--skip-bad-images", "1"]) == 0
    packed = open_parts(Path("b.tar"))[0]
    assert [packed.read(at) for at in range(len(packed))] == [png(1)]


def test_masks_are_refused(
    server: ObjectServer, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("images", "masks"):
        (store / "scenes" / kind).mkdir(parents=True)
        for number in range(3):
            made = png(number) if kind == "images" else mask_png(number)
            (store / "scenes" / kind / f"{number}.png").write_bytes(made)
    rows = [f"scenes/images/{at}.png,scenes/masks/{at}.png" for at in range(3)]
    (store / "masks.csv").write_text("\n".join(["path,mask", *rows]))
    for name in ("scenes", "masks.csv"):
        assert main(["pack", f"{server.url}/{name}", "a.tar"]) == 2
        assert f"{server.url}/{name} has masks in files of" in capsys.readouterr().err


def test_complaints_about_folders_name_their_address(
    server: ObjectServer, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / "pets" / "loose.png").write_bytes(png(50))
    assert main(["pack", f"{server.url}/pets", "a.tar"]) == 2
    error = capsys.readouterr().err
    assert f"{server.url}/pets/ holds images outside any class folder" in error
    assert "cache" not in error


def test_another_try_goes_on(server: ObjectServer, store: Path) -> None:
    """The finished shard is not fetched again."""

    def gone(request: object) -> Fault | None:
        return Fault(status=403) if "pets/dog/11" in getattr(request, "name", "") else None

    command: Callable[[], int] = lambda: main(  # noqa: E731
        ["pack", f"{server.url}/pets", "a.tar", "--shards", "6", "--no-shuffle"]
    )
    server.fault = gone
    assert command() == 2
    server.fault = lambda request: None
    asked = len(server.requests)
    assert command() == 0
    again = {one.name for one in server.requests[asked:] if one.name.endswith(".png")}
    assert 0 < len(again) < COUNT
    assert main(["pack", f"{store}/pets", "b.tar", "--shards", "6", "--no-shuffle"]) == 0
    assert bytes_of("a-*.tar") == bytes_of("b-*.tar")
