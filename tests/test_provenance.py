"""Records of what this user has made: outside of the folder, by content, and for nobody else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flambeau.provenance import (
    Permission,
    UntrustedCode,
    ask_for_config,
    is_recorded,
    record,
    state_folder,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_content_and_the_places_of_its_code_count(home: Path) -> None:
    assert not is_recorded(b"a", ["net.py:build"])
    assert record(b"a", ["net.py:build", "data.py:photos"])
    assert is_recorded(b"a", ["data.py:photos", "net.py:build"])
    assert is_recorded(b"a", [f"{home}/data.py:photos", f"{home}/net.py:build"])
    assert not is_recorded(b"b", ["data.py:photos", "net.py:build"])
    assert not is_recorded(b"a", ["net.py:build"])
    (home / "elsewhere").mkdir()
    os.chdir(home / "elsewhere")  # where another net.py lies beside another folder of equal bytes
    assert not is_recorded(b"a", ["net.py:build", "data.py:photos"])


def test_records_are_private_and_whole(home: Path) -> None:
    assert record(b"a")
    folder = state_folder()
    assert folder == home / "state" / "flambeau" / "made"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [len(path.name) for path in folder.iterdir()] == [64]
    assert record(b"a")
    assert len(list(folder.iterdir())) == 1


@pytest.mark.skipif(os.name != "posix", reason="rights of POSIX")
def test_a_folder_that_others_can_write_says_nothing(home: Path) -> None:
    assert record(b"a")
    folder = state_folder()
    assert folder is not None
    folder.chmod(0o777)
    assert not is_recorded(b"a")
    assert not record(b"b")
    folder.chmod(0o700)
    assert is_recorded(b"a")


def test_a_home_that_cannot_be_written_is_no_error(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "state").write_text("a file")
    assert not record(b"a")
    assert not is_recorded(b"a")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("none")))
    assert state_folder() is None
    assert not record(b"a")
    assert not is_recorded(b"a")


def test_many_processes_record_at_once(home: Path) -> None:
    code = "from flambeau.provenance import record\nfor n in range(50): assert record(b'%d' % n, ['x.py:f'])"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    assert all(is_recorded(b"%d" % n, ["x.py:f"]) for n in range(50))
    folder = state_folder()
    assert folder is not None
    assert len(list(folder.iterdir())) == 50


def test_permission_says_what_runs_or_refuses() -> None:
    said: list[str] = []
    with pytest.raises(UntrustedCode, match=r"^there needs code to be run: net\.py:build\n"):
        Permission(Path("there"), is_recorded=False, trust=False, say=said.append).ask(
            "net.py:build"
        )
    assert not said
    Permission(Path("there"), is_recorded=False, trust=True, say=said.append).ask("a\x1b[2J.py:f")
    Permission(Path("there"), is_recorded=True, trust=False, say=said.append).ask("net.py:build")
    assert said == [
        "running a\\x1b[2J.py:f, which there names (trusted)",
        "running net.py:build, which there names (your own)",
    ]


def test_settings_of_a_run_are_not_settings_of_ones_own(home: Path) -> None:
    values = {"model": "net.py:build", "data": "photos"}
    own, foreign = home / "own.toml", home / "run" / "config.toml"
    (home / "run" / "checkpoints").mkdir(parents=True)
    for path in (own, foreign):
        path.write_text("model = 'net.py:build'\n")
    ask_for_config(own, values, (), trust=False, say=print)
    ask_for_config(foreign, values, ("model",), trust=False, say=print)
    with pytest.raises(UntrustedCode):
        ask_for_config(foreign, values, (), trust=False, say=print)
    ask_for_config(foreign, values, (), trust=True, say=print)
    assert record(foreign.read_bytes(), ["net.py:build"])
    ask_for_config(foreign, values, (), trust=False, say=print)


@pytest.mark.parametrize("left", ["dataset.json", "metrics.jsonl", "model.safetensors"])
def test_a_run_without_its_checkpoints_is_a_run(home: Path, left: str) -> None:
    (home / "run").mkdir()
    (home / "run" / left).touch()
    config = home / "run" / "config.toml"
    config.write_text("model = 'net.py:build'\n")
    with pytest.raises(UntrustedCode):
        ask_for_config(config, {"model": "net.py:build"}, (), trust=False, say=print)


def test_code_in_a_file_of_settings_is_named_before_it_runs(home: Path) -> None:
    said: list[str] = []
    config = home / "settings.toml"
    config.write_text("model = 'net.py:build'\ndata = 'net.py:photos'\n")
    values = {"model": "net.py:build", "data": "net.py:photos"}
    ask_for_config(config, values, ("data",), trust=False, say=said.append)
    assert said == [f"running net.py:build, which {config} names (trusted)"]
