"""`--cache` and `--cache-size` of the commands that read data in a store."""

from pathlib import Path
from typing import Any

import pytest

from refused import refused
from shared_fixtures import process_as_it_was, write_images

COMMANDS = {
    "evaluate": "evaluate run {data} --all",
    "predict": "predict run {data}",
    "features": "features run {data} out.npy",
    "check": "check {data}",
    "pack": "pack {data} out.tar",
    "export": "export run --out exported --format safetensors --data {data}",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on shards in a folder."""
    from flambeau.cli.command import main

    folder = tmp_path_factory.mktemp("cache_flags")
    write_images(folder / "photos", per_class=12)
    assert main(["pack", f"{folder}/photos", f"{folder}/pets.tar", "--shards", "2"]) == 0
    how = "--image-size 32 --model tiny_convnet --epochs 1 --device cpu --batch-size 4"
    command = ["train", f"file://{folder}/pets.tar", "--out", f"{folder}/run"]
    with process_as_it_was():
        assert main([*command, "--cache", f"{folder}/of_train", *how.split()]) == 0
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/default")
    Path("run").symlink_to(trained / "run")


def kept(folder: str) -> list[Path]:
    return [path for path in Path(folder, "blocks").rglob("*") if path.is_file()]


@pytest.mark.parametrize("command", COMMANDS)
def test_blocks_are_kept_where_the_flag_says(flambeau: Any, trained: Path, command: str) -> None:
    words = COMMANDS[command].format(data=f"file://{trained}/pets.tar")
    answer = flambeau(words, "--cache mine --cache-size 1GB")
    assert answer.code in (0, 1), answer.err  # check finds copies
    assert kept("mine")
    assert not Path("default").exists()


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "export"])
def test_a_flag_without_effect_is_refused(flambeau: Any, trained: Path, command: str) -> None:
    local = trained / "pets.tar"
    words = COMMANDS[command].format(data=local)
    for flag in ("--cache mine", "--cache-size 5GB"):
        message = refused(flambeau(words, flag), flag, "has no effect with", "leave it out")
        assert str(local) in message
    refused(
        flambeau(COMMANDS[command].format(data="s3://bucket/a.tar"), "--cache-size 5"),
        "--cache-size must be a size such as 50GB",
    )
    assert not Path("mine").exists()


def test_the_data_of_a_run_are_kept_there_too(flambeau: Any, trained: Path) -> None:
    answer = flambeau("export run --out exported --format safetensors --cache mine")
    assert answer.code == 0, answer.err
    assert kept("mine")


def test_a_size_bounds_what_is_kept(flambeau: Any, trained: Path) -> None:
    answer = flambeau(f"check file://{trained}/pets.tar --cache mine --cache-size 3KB")
    assert answer.code in (0, 1), answer.err
    assert sum(path.stat().st_size for path in kept("mine")) <= 3000
