"""Some states of bench/faults/power_loss_outputs.py, and that what is bad is seen."""

import dataclasses
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from flambeau.data.pack import output_files
from flambeau.data.pack.encode_images import Conversion
from flambeau.data.pack.pack import pack
from flambeau.data.pack.shard_plan import Split
from flambeau.data.pack.verify import verify_file
from flambeau.data.sources.open_data import open_parts
from flambeau.data.stores.store import store
from load_script import load_script

FAULTS = Path(__file__).parents[1] / "bench" / "faults"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(FAULTS / "power_loss_outputs.py")


def bad(script: ModuleType, outputs: list[Any], scratch: Path, states: int) -> list[str]:
    _, found = script.campaign(outputs, scratch, states=states, seed=3, ends=math.inf)
    return found


def test_no_state_of_packed_images_and_weights_is_read_wrongly(
    script: ModuleType, tmp_path: Path
) -> None:
    outputs = [*script.packings(tmp_path), script.publishing()]
    outputs += [script.converting("weights.safetensors"), script.converting("weights.pth")]
    counts, found = script.campaign(outputs, tmp_path, states=1000, seed=3, ends=math.inf)
    assert found == []
    assert counts["kept, dropped or torn"] > 2000
    assert counts["different"] > 500
    assert counts["misdirected"] > 50


def test_no_state_of_an_export_is_read_wrongly(script: ModuleType, tmp_path: Path) -> None:
    script.make_images(tmp_path / "data", 0)
    assert bad(script, [script.exporting(tmp_path / "data")], tmp_path, 300) == []


def of_folder(script: ModuleType, scratch: Path) -> Any:
    return next(output for output in script.packings(scratch) if output.name == "folder")


def test_files_that_are_not_synced_are_seen(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_files, "sync_below", lambda folder, at_once=False: None)
    text = "\n".join(bad(script, [of_folder(script, tmp_path)], tmp_path, 300))
    assert "lost although the command had ended" in text


def test_older_files_that_are_lost_are_seen(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(files: output_files.PackFiles) -> None:
        for path in (*files.finals, *files._beside()):
            path.unlink()

    monkeypatch.setattr(output_files.PackFiles, "set_aside", removed)
    output = next(one for one in script.packings(tmp_path) if one.name == "a.rec --fresh")
    output = dataclasses.replace(output, again=None)
    assert "older files are lost" in "\n".join(bad(script, [output], tmp_path, 300))


def test_content_that_is_read_wrongly_is_seen(script: ModuleType, tmp_path: Path) -> None:
    numbers = iter(range(10_000))
    output = dataclasses.replace(of_folder(script, tmp_path), read=lambda folder: next(numbers))
    assert "read wrongly" in "\n".join(bad(script, [output], tmp_path, 300))


def copy_of_a_parquet(images: Path, top: Path) -> None:
    pytest.importorskip("pyarrow")
    pack(images, images.parent / "a.parquet", Conversion(), Split(), workers=1)
    open_parts(images.parent / "a.parquet")  # it is copied into FLAMBEAU_DATA


def object_of_a_store(images: Path, top: Path) -> None:
    store().put(next(images.rglob("*.bmp")), f"file://{top}/a.bmp")


def salvaged_file(images: Path, top: Path) -> None:
    pack(images, images.parent / "a.npz", Conversion("raw"), Split(), workers=1)
    assert verify_file(images.parent / "a.npz", "npz", salvage=top / "b.npz").saved


def salvaged_folder(images: Path, top: Path) -> None:
    assert verify_file(images, "folder", salvage=top / "b").saved


@pytest.mark.parametrize(
    "work", [copy_of_a_parquet, object_of_a_store, salvaged_file, salvaged_folder]
)
def test_what_else_is_written_has_its_name_when_it_is_synced(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Path, Path], None],
) -> None:
    monkeypatch.setattr(output_files, "_sync_file_system", lambda folder: False)
    script.make_images(tmp_path / "images", 0)
    top = tmp_path / "top"
    top.mkdir()
    monkeypatch.setenv("FLAMBEAU_DATA", str(top))
    num_files = 0
    for moment in recorded(script, top, lambda: work(tmp_path / "images", top)):
        whole = moment.left(script.faults.everything, lambda synced, data: data)
        emptied = moment.left(script.faults.everything, lambda synced, data: b"")
        for name in whole:
            if not any(part.startswith(".") for part in Path(name).parts):
                assert emptied[name] == whole[name], name
                num_files += bool(whole[name])
    assert num_files > 0


# ------------------------------------------------------------------ the recording


def recorded(script: ModuleType, folder: Path, work: Callable[[], object]) -> list[Any]:
    with script.Recording(folder) as recording:
        work()
    return recording.moments


def nothing_kept(script: ModuleType, moment: Any) -> dict[str, bytes | None]:
    return moment.left(script.faults.nothing, lambda synced, data: synced)


def sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    os.fsync(opened)
    os.close(opened)


def test_what_was_not_synced_is_lost(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "before").write_bytes(b"b")

    def work() -> None:
        (tmp_path / "a").write_bytes(b"one")
        sync(tmp_path / "a")
        (tmp_path / "a").write_bytes(b"two")
        sync(tmp_path)
        (tmp_path / "c").write_bytes(b"c")

    *_, before_the_name, end = recorded(script, tmp_path, work)
    assert nothing_kept(script, before_the_name) == {"before": b"b"}
    assert nothing_kept(script, end) == {"before": b"b", "a": b"one"}
    whole = end.left(script.faults.everything, lambda synced, data: data)
    assert whole == {"before": b"b", "a": b"two", "c": b"c"}


def test_a_name_that_goes_to_another_folder_is_in_one_of_them(
    script: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "a").write_bytes(b"a")
    moments = recorded(script, tmp_path, lambda: (tmp_path / "a").rename(tmp_path / "other" / "a"))
    rng = random.Random(0)
    left = [moments[-1].left(script.faults.some(rng), lambda synced, data: data) for _ in range(20)]
    assert {"other": None, "a": b"a"} in left
    assert {"other": None, "other/a": b"a"} in left
    assert all(len(tree) == 2 for tree in left)


def test_what_is_written_through_memory_is_seen(script: ModuleType, tmp_path: Path) -> None:
    def work() -> None:
        array = np.memmap(tmp_path / "a", np.uint8, "w+", shape=4)
        array[:] = 7
        sync(tmp_path / "a")
        sync(tmp_path)
        array[0] = 8

    end = recorded(script, tmp_path, work)[-1]
    assert nothing_kept(script, end) == {"a": bytes([7, 7, 7, 7])}
    whole = end.left(script.faults.everything, lambda synced, data: data)
    assert whole == {"a": bytes([8, 7, 7, 7])}
