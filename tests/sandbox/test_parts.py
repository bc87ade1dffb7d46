"""The parts of the sandbox: which mounts there are, what is copied, what has changed, where a run goes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flambeau.sandbox.changed_files import ChangedFiles
from flambeau.sandbox.inside_trial import HELD, MARK, folder_for_run, in_trial
from flambeau.sandbox.mount_syscalls import mount_of, read_mounts
from flambeau.sandbox.sandbox import copy_folder
from flambeau.sandbox.trial_processes import processes_of

MOUNTS = r"""
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
22 27 0:21 / /proc rw - proc proc rw
30 27 0:30 / /run/user/1000 rw,nosuid - tmpfs tmpfs rw,size=10k
25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw
40 27 0:40 / /mnt/my\040disk ro,relatime - ext4 /dev/vdb rw
41 40 0:41 / /mnt/my\040disk/inner rw - nfs4 server:/x ro
42 27 0:42 / /data rw - ext4 /dev/vdc rw
43 27 0:43 / /data ro - fuse.sshfs host: rw
""".strip()


def test_mounts_are_read_parents_first_and_the_last_of_several_at_a_path() -> None:
    mounts = {one.path: one for one in read_mounts(MOUNTS)}
    assert next(iter(mounts)) == "/"
    assert mounts["/mnt/my disk"].is_read_only  # of the mount
    assert mounts["/mnt/my disk/inner"].is_read_only  # of the file system
    assert mounts["/data"].kind == "fuse.sshfs" and mounts["/data"].is_read_only
    holding = {path for path, one in mounts.items() if one.holds_files}
    assert holding == {"/", "/run/user/1000", "/mnt/my disk", "/mnt/my disk/inner", "/data"}


def test_a_chroot_has_no_root_among_its_mounts() -> None:
    [*inside] = [one for one in read_mounts(MOUNTS) if one.path != "/"]
    assert mount_of("/data/photos", inside).kind == "fuse.sshfs"
    assert (mount_of("/home/me", inside).path, mount_of("/home/me", inside).kind) == ("/", "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_mounts_of_this_machine() -> None:
    mounts = {one.path: one for one in read_mounts()}
    assert mounts["/"].holds_files
    assert not mounts["/proc"].holds_files


def test_a_copy_has_small_files_and_links_to_large_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flambeau.sandbox.sandbox._SMALL_BYTES", 100)
    monkeypatch.setattr("flambeau.sandbox.sandbox._cloned", lambda old, new: False)
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "in").mkdir(parents=True)
    (source / "in" / "small").write_bytes(b"x" * 100)
    (source / "large").write_bytes(b"x" * 101)
    (source / "to small").symlink_to("in/small")
    (source / "to in").symlink_to("in", target_is_directory=True)
    (source / "out").symlink_to("../elsewhere")
    (source / "gone").symlink_to("nothing")
    os.mkfifo(source / "pipe")
    (tmp_path / "elsewhere").write_text("other")
    copy_folder(source, target)
    assert not (target / "in" / "small").is_symlink() and (target / "large").is_symlink()
    assert (target / "large").readlink() == source / "large"
    assert (target / "to small").readlink() == Path("in/small")
    assert (target / "to in").readlink() == Path("in")
    assert (target / "out").read_text() == "other"
    assert (target / "gone").is_symlink() and not (target / "pipe").exists()


def test_what_has_changed_is_listed_whole(tmp_path: Path) -> None:
    for name in ("a", "b", "c/d", "c/e", "kept"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("a")
    own = tmp_path / "own"
    own.mkdir()
    changed = ChangedFiles([tmp_path, tmp_path / "c"])
    assert changed.folders == [tmp_path]
    time.sleep(0.02)  # the clock of a file system may tick every 10 ms
    facts = (tmp_path / "a").stat()
    (tmp_path / "a").write_text("A")
    os.utime(tmp_path / "a", ns=(facts.st_atime_ns, facts.st_mtime_ns))  # which hides nothing
    (tmp_path / "b").unlink()
    (tmp_path / "c/d").chmod(0o600)
    (tmp_path / "c/e").replace(tmp_path / "c/f")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("kept")
    (own / "scratch").write_text("ours")
    assert changed.changes(except_in=[own]) == [
        ("changed", tmp_path / "a"), ("removed", tmp_path / "b"), ("changed", tmp_path / "c/d"),
        ("removed", tmp_path / "c/e"), ("made", tmp_path / "c/f"), ("changed", tmp_path / "link"),
    ]  # fmt: skip
    assert changed.is_complete


def test_a_run_in_a_trial_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MARK, raising=False)
    assert folder_for_run(Path("runs/mine")) == Path("runs/mine") and not in_trial()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, "/trial")
    assert in_trial()
    folder = folder_for_run(Path("runs/mine"))
    assert folder.parent == Path("/trial/runs")
    assert folder_for_run(tmp_path / "runs" / "mine") == folder == folder_for_run(folder)
    assert folder_for_run(Path("runs/other")) != folder
    assert not Path("runs").exists()


def test_a_script_finds_its_new_run_where_it_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, f"{tmp_path}/trial")
    monkeypatch.setenv(HELD, "1")
    folder = folder_for_run(Path("runs/mine"))
    Path("runs/mine/notes.txt").write_text("beside the checkpoints")
    assert (folder / "notes.txt").exists() and folder.is_relative_to(tmp_path / "trial")
    assert folder_for_run(Path("runs/mine")) == folder

    Path("runs/users").mkdir()
    assert folder_for_run(Path("runs/users")) != folder
    assert Path("runs/users").is_dir() and not Path("runs/users").is_symlink()

    Path("file").touch()
    assert folder_for_run(Path("file/run")).parent == folder.parent  # nothing can be made there


def test_a_namespace_whose_number_is_given_again_belongs_to_another_doctor(tmp_path: Path) -> None:
    """Processes in it that do not come from this one are not those of a trial, and are not killed."""
    inside = ["unshare", "-Urm", "sleep", "300"]
    child = subprocess.Popen(inside)
    start = "unshare -Urm sleep 300 >/dev/null 2>&1 & echo $!"
    orphan = int(subprocess.run(["sh", "-c", start], capture_output=True, check=True).stdout)
    try:
        here = Path("/proc/self/ns/mnt").readlink()
        namespaces = {}
        end = time.monotonic() + 300
        while len(namespaces) < 2 and child.poll() is None and time.monotonic() < end:
            for process in (child.pid, orphan):
                with contextlib.suppress(OSError):
                    namespace = Path(f"/proc/{process}/ns/mnt").readlink()
                    if namespace != here:
                        namespaces[process] = str(namespace)
            time.sleep(0.05)
        if len(namespaces) < 2:
            pytest.skip("no mount namespaces may be made here")
        assert list(processes_of(tmp_path, namespaces[child.pid])) == [child.pid]
        assert list(processes_of(tmp_path, namespaces[orphan])) == []
    finally:
        child.kill()
        child.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)
