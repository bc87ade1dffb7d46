"""What a command does in the sandbox is done to no file of the user, whoever the user is."""

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flambeau.errors import InputError
from flambeau.sandbox import sandbox as sandbox_module
from flambeau.sandbox.sandbox import UNPROTECTED, WAYS, Sandbox
from flambeau.sandbox.scratch import Scratch, remove_abandoned
from flambeau.sandbox.trial_processes import processes_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes are Linux's")

# Each line changes what was there in another way.
CHANGES = """
echo new > last.pt
echo more >> train.log
mv best.pt old.pt
echo tmp > tmp.pt && mv tmp.pt kept.pt
rm -r folder
mkdir -p made/deep && echo x > made/deep/file
ln -sfn elsewhere link
echo through > hard
chmod 600 mode.pt
touch -d 2001-01-01 time.pt
truncate -s 3 sparse
mv directory renamed
"""


def tree(folder: Path) -> dict[str, tuple[object, ...]]:
    """All that can be told of the files of a folder."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        facts = path.lstat()
        content: object = None
        if path.is_symlink():
            content = path.readlink()
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(folder))] = (
            content, stat.S_IMODE(facts.st_mode), facts.st_ino, facts.st_nlink, facts.st_uid, facts.st_gid,
            facts.st_mtime_ns, facts.st_ctime_ns,
        )  # fmt: skip
    return found


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("last.pt", "train.log", "best.pt", "kept.pt", "mode.pt", "time.pt", "one"):
        (folder / name).write_text(f"my own {name}")
    os.link(folder / "one", folder / "hard")
    (folder / "link").symlink_to("last.pt")
    with (folder / "sparse").open("wb") as file:
        file.truncate(1 << 22)
    for name in ("folder", "directory"):
        (folder / name).mkdir()
        (folder / name / "a.pt").write_text("a")
    monkeypatch.chdir(folder)
    return folder


def run(sandbox: Sandbox, *command: str) -> tuple[int, str, Path]:
    """Exit code, output and the folder, whose content is gone by then."""
    folder = sandbox.new_folder()
    with tempfile.TemporaryFile() as output:
        process = sandbox.start(command, folder, dict(os.environ), output)
        code = process.wait(300)
        said = sandbox.failure(folder)
        sandbox.end(folder)
        output.seek(0)
        return code, said + output.read().decode(), folder


@pytest.mark.parametrize("way", WAYS)
def test_every_change_succeeds_inside_and_none_reaches_the_files(way: str, files: Path) -> None:
    before = tree(files)
    home = Path("~").expanduser()
    name = f"flambeau-test-{os.getpid()}"
    with Sandbox(way) as sandbox:
        code, said, folder = run(sandbox, "sh", "-ec", f"{CHANGES}cat last.pt hard; ls")
        assert code == 0, said
        assert said.startswith("new\nthrough\n")
        assert {"old.pt", "renamed", "made"} <= set(said.split()) and "best.pt" not in said.split()
        again = run(sandbox, "sh", "-ec", "cat last.pt; ls")[1]
        assert again.startswith("my own last.pt") and "renamed" not in again  # from the start
        run(
            sandbox,
            "sh",
            "-c",
            f"touch {home}/{name} {tempfile.gettempdir()}/{name} /var/tmp/{name}",
        )
        run(sandbox, "sh", "-c", f"rm -rf {files}; echo x > {files}/last.pt")  # absolute
    assert tree(files) == before
    assert not folder.exists()
    for place in (home, Path(tempfile.gettempdir()), Path("/var/tmp")):
        assert not (place / name).exists()


AS_NOBODY = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
os.chdir(sys.argv[2])
from flambeau.sandbox.sandbox import Sandbox
with Sandbox("overlayfs") as sandbox:
    folder = sandbox.new_folder()
    process = sandbox.start(["sh", "-ec", sys.argv[3]], folder, dict(os.environ), sys.stdout)
    print(json.dumps([process.wait(300), sandbox.failure(folder), os.geteuid()]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("holds_mount", [False, True])
def test_an_unprivileged_user_needs_no_root(holds_mount: bool) -> None:
    """Among the files of a group, too, whose copies the kernel could not give to it.

    A home in which something is mounted cannot be covered as a whole, and no cache may be made in it.
    """
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("the interpreter of these tests may be readable by root alone")
    place = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        place.chmod(0o755)
        sources = Path(sandbox_module.__file__).parents[1]
        for name in ("__init__.py", "errors.py", "version.py"):
            (place / "flambeau").mkdir(exist_ok=True)
            shutil.copy(sources / name, place / "flambeau" / name)
        shutil.copytree(sources / "sandbox", place / "flambeau" / "sandbox")
        project = place / "project"
        (project / "deep").mkdir(parents=True)
        (project / "mounted").mkdir()
        (project / "deep" / "last.pt").write_text("mine")
        for path in (project, *project.iterdir(), project / "deep" / "last.pt"):
            os.chown(path, 12345, 12346)
            path.chmod(0o777 if path.is_dir() else 0o664)
        before = tree(project)
        here = project / "deep" if holds_mount else project
        change = "echo new > last.pt; cat last.pt; mkdir er; mv er est; rm -r est last.pt"
        if not holds_mount:
            change = f"cd deep; {change}; cd ..; rm -r deep"
        words = [python, "-c", AS_NOBODY, str(place), str(here), change]
        words = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", *words]
        if holds_mount:
            words = [
                "unshare",
                "-m",
                "sh",
                "-ec",
                'mount -t tmpfs t mounted; exec "$@"',
                "sh",
                *words,
            ]
        done = subprocess.run(
            words, cwd=project, capture_output=True, text=True, check=False,
            env={"PATH": os.environ["PATH"], "HOME": str(project)},
        )  # fmt: skip
        if "not permitted" in done.stderr:
            pytest.skip("namespaces are not allowed here")
        assert done.returncode == 0, done.stderr
        said, report = done.stdout.splitlines()
        assert said == "new" and json.loads(report) == [0, "", 12345]
        assert tree(project) == before
    finally:
        shutil.rmtree(place)


def test_sockets_of_others_and_the_folder_of_the_trial_are_real(files: Path) -> None:
    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{place}/socket")
        server.listen()
        code = "import socket; socket.socket(socket.AF_UNIX).connect({!r})"
        with Sandbox("overlayfs") as sandbox:
            exit_code, said, _ = run(sandbox, sys.executable, "-c", code.format(f"{place}/socket"))
            assert exit_code == 0, said
            folder = sandbox.new_folder()
            process = sandbox.start(
                ["sh", "-c", "echo told > $FLAMBEAU_TRIAL/told"],
                folder,
                dict(os.environ),
                sys.stderr,
            )
            process.wait(300)
            assert (folder / "told").read_text() == "told\n"
            sandbox.end(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_file_that_is_a_mount_itself_stays_as_it_is(files: Path) -> None:
    code = (
        "import os, sys\nfrom flambeau.sandbox.sandbox import Sandbox\n"
        "with Sandbox('overlayfs') as sandbox:\n"
        "    folder = sandbox.new_folder()\n"
        "    words = ['sh', '-ec', 'echo new > kept.pt; cat kept.pt']\n"
        "    sandbox.start(words, folder, dict(os.environ), sys.stdout).wait(300)"
    )
    words = ["unshare", "-m", "sh", "-ec", 'mount --bind one kept.pt; "$@"; cat kept.pt', "sh"]
    done = subprocess.run(
        [*words, sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "new\nmy own one", done.stderr
    assert (
        Path("one").read_text() == "my own one" and Path("kept.pt").read_text() == "my own kept.pt"
    )


@pytest.mark.parametrize("way", WAYS)
def test_the_folder_of_the_starting_process_is_no_way_out(way: str, files: Path) -> None:
    with Sandbox(way) as sandbox:
        code, said, _ = run(sandbox, "sh", "-c", f"echo x > /proc/{os.getpid()}/cwd/out; echo $?")
    assert not (files / "out").exists(), said
    assert code == 0 and "denied" in said


@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_a_command_leaves_behind_goes_on(way: str, files: Path) -> None:
    """A daemon with a session and an environment of its own carries no mark."""
    mark = f"600.{os.getpid()}"
    with Sandbox(way) as sandbox:
        run(sandbox, "sh", "-c", f"setsid env -i sleep {mark} & sleep 0.2")
    for _ in range(100):
        lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
        if not any(mark.encode() in line for line in lines):
            break
        time.sleep(0.05)
    else:
        pytest.fail("it sleeps still")
    assert sandbox.folders == []


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory")
def test_shared_memory_is_real_but_for_a_working_folder_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        place = Path(name, "mine")
        place.mkdir()
        (place / "last.pt").write_text("my own")
        monkeypatch.chdir(place)
        with Sandbox("overlayfs") as sandbox:
            done = run(sandbox, "sh", "-ec", "echo new > last.pt; cat last.pt; echo x > ../shared")
            assert done[:2] == (0, "new\n")
        assert (place / "last.pt").read_text() == "my own"
        assert (place.parent / "shared").read_text() == "x\n"
        monkeypatch.undo()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory")
def test_shared_memory_of_killed_processes_is_removed(files: Path) -> None:
    """Of theirs alone: neither what was there before, nor what another process made meanwhile or uses."""
    code = (
        "import pathlib, sys, time\nfrom multiprocessing import shared_memory\n"
        "mine = [shared_memory.SharedMemory(sys.argv[1] + end, True, 99) for end in ('-1', '-2')]\n"
        "old = shared_memory.SharedMemory(sys.argv[2])\n"
        "print('made', flush=True)\ntime.sleep(300)"
    )
    mark = f"flambeau-test-{os.getpid()}"
    old, meanwhile, used = (Path("/dev/shm", mark + end) for end in ("-old", "-new", "-2"))
    old.write_bytes(bytes(99))
    try:
        with Sandbox("overlayfs") as sandbox:
            folder = sandbox.new_folder()
            reading, writing = os.pipe()
            command = [sys.executable, "-c", code, mark, old.name]
            with open(writing, "w") as output, open(reading) as lines:  # noqa: PTH123
                sandbox.start(command, folder, dict(os.environ), output)
                assert lines.readline() == "made\n"
                meanwhile.touch()
                with used.open("rb"):
                    sandbox.end(folder)
            left = {path.name for path in Path("/dev/shm").glob(f"{mark}*")}
            assert left == {old.name, meanwhile.name, used.name}
    finally:
        for path in Path("/dev/shm").glob(f"{mark}*"):
            path.unlink()


def test_caches_last_from_one_command_to_the_next(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for there in (True, False):  # with one of the user's, and without
        cache = files / f"cache-{there}"
        if there:
            cache.mkdir()
        monkeypatch.setenv("TORCH_HOME", str(cache))
        with Sandbox("overlayfs") as sandbox:
            assert run(sandbox, "sh", "-c", f"echo slow > {cache}/compiled")[0] == 0
            assert run(sandbox, "cat", f"{cache}/compiled")[1] == "slow\n"
        assert not (cache / "compiled").exists()


def test_a_machine_that_cannot(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary that the probe writes reaches the user's folder, and is removed."""
    monkeypatch.setattr(Sandbox, "_view", lambda self, running: {"no such argument": 3})
    monkeypatch.setattr(sandbox_module, "landlock_version", lambda: 0)
    before = set(files.iterdir())
    with pytest.raises(InputError) as refused:
        Sandbox()
    assert "cannot keep a script from your files (overlayfs: " in str(refused.value)
    assert "copy: no Landlock in this kernel)\n--trials-may-write runs" in str(refused.value)
    with Sandbox(UNPROTECTED) as sandbox:
        assert "may change your files" in sandbox.notice
        assert run(sandbox, "sh", "-c", "echo new > last.pt")[0] == 0
    assert (files / "last.pt").read_text() == "new\n"
    assert set(files.iterdir()) == before


def test_a_program_that_does_not_exist(files: Path) -> None:
    with Sandbox() as sandbox, pytest.raises(InputError, match="no-such: no such program"):
        run(sandbox, "no-such")


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Path]:
    """The place of a sandbox whose process was killed while a command ran."""
    code = (
        "import os, sys, time\nfrom flambeau.sandbox.sandbox import Sandbox\n"
        "sandbox = Sandbox()\nfolder = sandbox.new_folder()\n"
        "sandbox.start(['sh', '-c', 'mkdir -m 0 closed; sleep 300'], folder, dict(os.environ), sys.stderr)\n"
        "print(folder, flush=True)\ntime.sleep(300)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    for _ in range(200):
        if list(processes_of(folder)):
            break
        time.sleep(0.05)
    process.kill()
    process.communicate()
    yield folder


def test_the_next_one_removes_what_a_killed_one_has_left(killed: Path) -> None:
    place = killed.parents[1]
    with Scratch() as other:  # which is in use
        remove_abandoned(place)
        assert other.folders[0].exists()
    assert not killed.exists() and not list(place.glob("flambeau-trials-*"))
    assert not list(processes_of(killed))


def test_a_folder_that_nobody_could_lock_is_removed_after_an_hour(tmp_path: Path) -> None:
    new, old = tmp_path / "flambeau-new-trials-new", tmp_path / "flambeau-new-trials-old"
    for folder in (new, old):
        folder.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    remove_abandoned(tmp_path)
    assert new.exists() and not old.exists()


def test_a_disk_that_becomes_full(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scratch() as scratch:
        assert scratch.written_too_much() == ""
        usage = shutil.disk_usage(scratch.folders[0])
        half = usage._replace(free=usage.free // 2 - 1)
        monkeypatch.setattr("shutil.disk_usage", lambda folder: half)
        assert "half of what was free" in scratch.written_too_much()
