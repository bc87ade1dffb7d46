"""Ways of saving by the calls of the operating system and of Python itself: files, folders, links, times."""

import csv
import json
import logging
import logging.handlers
import mmap
import os
import pickle
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

Save = Callable[[int], None]
PT = Path("last.pt")


def state(model: nn.Module, step: int) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {"model": model.state_dict(), "step": step}


def written(step: int, file: Path = PT) -> None:
    """The checkpoint is the one of this step."""
    assert torch.load(file)["step"] == step, file


def direct(model: nn.Module) -> Save:
    def save(step: int) -> None:
        torch.save(state(model, step), PT)
        written(step)

    return save


def from_import(model: nn.Module) -> Save:
    from torch import save as torch_save

    def save(step: int) -> None:
        torch_save(state(model, step), "last.pt")
        written(step)

    return save


def atomic(model: nn.Module) -> Save:
    def save(step: int) -> None:
        torch.save(state(model, step), "last.pt.tmp")
        Path("last.pt.tmp").replace(PT)
        written(step)

    return save


def imagenet(model: nn.Module) -> Save:
    def save(step: int) -> None:
        torch.save(state(model, step), "checkpoint.pth.tar")
        shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
        written(step, Path("model_best.pth.tar"))

    return save


def handle(model: nn.Module) -> Save:
    def save(step: int) -> None:
        with PT.open("wb") as file:
            torch.save(state(model, step), file)
        written(step)

    return save


def kept_handle(model: nn.Module) -> Save:
    file = PT.open("r+b", buffering=0)

    def save(step: int) -> None:
        file.seek(0)
        torch.save(state(model, step), file)
        written(step)

    return save


def in_thread(model: nn.Module) -> Save:
    def save(step: int) -> None:
        thread = threading.Thread(target=torch.save, args=(state(model, step), "last.pt"))
        thread.start()
        thread.join()
        written(step)

    return save


def script_module(model: nn.Module) -> Save:
    def save(step: int) -> None:
        torch.jit.save(torch.jit.script(model), "last.pt")
        weight = torch.jit.load("last.pt").state_dict()["0.weight"]
        assert torch.equal(weight, model.state_dict()["0.weight"])

    return save


def if_missing(model: nn.Module) -> Save:
    def save(step: int) -> None:
        if not Path("new.pt").exists():
            torch.save(state(model, step), "new.pt")
        assert torch.load("new.pt")["step"] >= 0

    return save


def goes_on(model: nn.Module) -> Save:
    first = torch.load(PT)["step"]

    def save(step: int) -> None:
        torch.save(state(model, first + step), PT)
        written(first + step)

    return save


def prepare_checkpoint() -> None:
    torch.save(state(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)), 7), PT)


def rotation(model: nn.Module) -> Save:
    def save(step: int) -> None:
        torch.save(state(model, step), f"ck-{step:06d}.pt")
        for old in sorted(Path().glob("ck-*.pt"))[:-2]:
            old.unlink()
        assert len(list(Path().glob("ck-*.pt"))) <= 2

    return save


def named_as_ours(model: nn.Module) -> Save:
    def save(step: int) -> None:
        torch.save(state(model, step), PT)
        torch.save(state(model, step), "last.pt.flambeau-doctor")
        written(step, Path("last.pt.flambeau-doctor"))

    return save


def numpy_files(model: nn.Module) -> Save:
    def save(step: int) -> None:
        np.save("last.npy", np.full(9, step))
        np.savez("last.npz", step=np.full(9, step))
        assert np.load("last.npz")["step"][0] == step == np.load("last.npy")[0]

    return save


def pickled(model: nn.Module) -> Save:
    def save(step: int) -> None:
        with Path("last.pkl").open("wb") as file:
            pickle.dump(state(model, step), file)
        with Path("last.pkl").open("rb") as file:
            assert pickle.load(file)["step"] == step

    return save


def appended(model: nn.Module) -> Save:
    def save(step: int) -> None:
        with Path("rows.jsonl").open("a") as rows, Path("rows.csv").open("a", newline="") as table:
            rows.write(json.dumps({"step": step}) + "\n")
            csv.writer(table).writerow([step, 0.5])
        assert json.loads(Path("rows.jsonl").read_text().splitlines()[-1])["step"] == step

    return save


def kept_log(model: nn.Module) -> Save:
    log = Path("train.log").open("a")  # noqa: SIM115
    log.write("started\n")

    def save(step: int) -> None:
        log.write(f"step {step}\n")
        log.flush()
        assert Path("train.log").read_text().endswith(f"step {step}\n")

    return save


def logging_handlers(model: nn.Module) -> Save:
    logger = logging.getLogger("train")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.FileHandler("train.log"))
    logger.addHandler(
        logging.handlers.RotatingFileHandler("turning.log", maxBytes=200, backupCount=2)
    )

    def save(step: int) -> None:
        logger.info("step %d", step)
        assert f"step {step}" in Path("train.log").read_text()

    return save


def emptied_folder(model: nn.Module) -> Save:
    shutil.rmtree("out")
    Path("out").mkdir()

    def save(step: int) -> None:
        torch.save(state(model, step), "out/new.pt")
        assert [file.name for file in Path("out").iterdir()] == ["new.pt"]

    return save


def folders(model: nn.Module) -> Save:
    """Made, removed, renamed, one put in the place of another."""
    shutil.rmtree("old", ignore_errors=True)
    Path("mine").rename("theirs")

    def save(step: int) -> None:
        Path(f"run/{step}").mkdir(parents=True, exist_ok=True)
        torch.save(state(model, step), f"run/{step}/m.pt")
        if step:
            shutil.rmtree("run/0", ignore_errors=True)
        assert Path("theirs/a.txt").exists() and not Path("mine").exists()

    return save


def file_becomes_folder(model: nn.Module) -> Save:
    PT.unlink()
    PT.mkdir()
    shutil.rmtree("out")
    Path("out").write_text("a file now")

    def save(step: int) -> None:
        torch.save(state(model, step), PT / "m.pt")
        written(step, PT / "m.pt")

    return save


def link_to_newest(model: nn.Module) -> Save:
    def save(step: int) -> None:
        torch.save(state(model, step), f"ck-{step:06d}.pt")
        Path("latest.pt").unlink(missing_ok=True)
        Path("latest.pt").symlink_to(f"ck-{step:06d}.pt")
        written(step, Path("latest.pt"))

    return save


def prepare_link_to_newest() -> None:
    Path("latest.pt").symlink_to("ck-900000.pt")


def through_links(model: nn.Module) -> Save:
    """By a link to a file, one to a folder, and one to nothing, out of the working directory."""

    def save(step: int) -> None:
        torch.save(state(model, step), "file.pt")
        torch.save(state(model, step), "folder/m.pt")
        torch.save(state(model, step), "dangling.pt")
        for file in (outside() / "real.pt", outside() / "there/m.pt", outside() / "nothing.pt"):
            written(step, file)

    return save


def prepare_links() -> None:
    Path("file.pt").symlink_to(outside() / "real.pt")
    Path("folder").symlink_to(outside() / "there")
    Path("dangling.pt").symlink_to(outside() / "nothing.pt")


def outside() -> Path:
    """A folder outside of the working directory, by its full path."""
    return Path(os.environ["SAVING_OUTSIDE"])


def hard_links(model: nn.Module) -> Save:
    """Writes through one of two names, gives a file a third one, and parts two that were one."""

    def save(step: int) -> None:
        with Path("one.bin").open("r+b") as file:
            file.write(b"%09d" % step)
        assert Path("one.bin").read_bytes()[:9] == b"%09d" % step
        Path("third.bin").unlink(missing_ok=True)
        os.link("one.bin", "third.bin")
        assert Path("third.bin").stat().st_nlink >= 2
        torch.save(state(model, step), "b.tmp")
        Path("b.tmp").replace("b.pt")

    return save


def prepare_hard_links() -> None:
    os.link("one.bin", "two.bin")
    os.link("a.pt", "b.pt")


def sparse(model: nn.Module) -> Save:
    def save(step: int) -> None:
        with Path("holes.bin").open("r+b") as file:
            file.truncate(2**24 + step)
            file.seek(2**23)
            file.write(b"%d" % step)
        assert Path("holes.bin").stat().st_size == 2**24 + step

    return save


def prepare_sparse() -> None:
    with Path("holes.bin").open("wb") as file:
        file.truncate(2**24)
        file.seek(2**20)
        file.write(b"an island")


def mapped(model: nn.Module) -> Save:
    """By NumPy, by mmap, and by torch, in three ways."""
    array = np.memmap("a.bin", dtype=np.int64, mode="r+", shape=(8,))
    with Path("b.bin").open("r+b") as file:
        view = mmap.mmap(file.fileno(), 64)
    tensor = torch.from_file("c.bin", shared=True, size=8, dtype=torch.int64)
    storage = torch.UntypedStorage.from_file("d.bin", True, 64)
    whole = torch.tensor([], dtype=torch.uint8).set_(storage)

    def save(step: int) -> None:
        array[:] = step + 1
        array.flush()
        view[:8] = b"%08d" % step
        view.flush()
        tensor.fill_(step + 1)
        whole.fill_((step + 1) % 256)
        assert Path("b.bin").read_bytes()[:8] == b"%08d" % step
        assert (
            Path("a.bin").read_bytes()[:1]
            == Path("c.bin").read_bytes()[:1]
            == bytes([(step + 1) % 256])
        )

    return save


def changed_directory(model: nn.Module) -> Save:
    os.chdir("sub")
    return direct(model)


def by_full_path(model: nn.Module) -> Save:
    def save(step: int) -> None:
        torch.save(state(model, step), outside() / "result.pt")
        (outside() / "gone.txt").unlink(missing_ok=True)
        written(step, outside() / "result.pt")

    return save


def home(model: nn.Module) -> Save:
    place = Path("~").expanduser()
    (place / ".cache/mine").mkdir(parents=True, exist_ok=True)

    def save(step: int) -> None:
        for file in (place / "result.pt", place / ".cache/mine/result.pt"):
            torch.save(state(model, step), file)
            written(step, file)
        (place / ".config/mine.ini").write_text(f"step = {step}\n")

    return save


def temporary(model: nn.Module) -> Save:
    place = Path(tempfile.gettempdir())
    assert place == Path(os.environ["TMPDIR"])
    kept = Path(tempfile.mkdtemp())
    var = Path(os.environ["SAVING_VAR"])

    def save(step: int) -> None:
        for file in (place / "cache.pt", kept / "m.pt", var / "cache.pt"):
            torch.save(state(model, step), file)
            written(step, file)

    return save


def attributes(model: nn.Module) -> Save:
    """Mode, times, owner and extended attributes of files that are not written to."""

    def save(step: int) -> None:
        Path("mode.bin").chmod(0o640 if step % 10 else 0o600)
        os.utime("times.bin", (1, 1 + step))
        os.setxattr("extended.bin", "user.step", b"%d" % step)
        os.removexattr("extended.bin", "user.mine") if step == 0 else None
        os.chown("owner.bin", 1234, 1234) if os.geteuid() == 0 else Path("owner.bin").chmod(0o600)
        Path("sub").chmod(0o700)
        assert int(Path("times.bin").stat().st_mtime) == 1 + step
        assert os.getxattr("extended.bin", "user.step") == b"%d" % step

    return save


def prepare_attributes() -> None:
    os.setxattr("extended.bin", "user.mine", b"the user's")


def open_flags(model: nn.Module) -> Save:
    """Opened to append and to be emptied; cut by ftruncate; beside a folder's descriptor; without a name."""

    def save(step: int) -> None:
        place = os.open(".", os.O_RDONLY)
        for name, flags in (("a.bin", os.O_APPEND), ("t.bin", os.O_TRUNC), ("d.bin", os.O_SYNC)):
            file = os.open(name, os.O_WRONLY | flags, dir_fd=place)
            os.write(file, b"%09d" % step)
            os.close(file)
        os.truncate("f.bin", 5 + step % 7)
        os.rename(
            "r.bin" if step % 2 == 0 else "q.bin",
            "q.bin" if step % 2 == 0 else "r.bin",
            src_dir_fd=place,
            dst_dir_fd=place,
        )
        os.close(place)
        assert Path("a.bin").read_bytes().endswith(b"%09d" % step)
        assert Path("t.bin").read_bytes() == b"%09d" % step

    return save


def nameless(model: nn.Module) -> Save:
    """O_TMPFILE, which gets its name later."""

    def save(step: int) -> None:
        file = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
        os.write(file, b"%09d" % step)
        Path("named.bin").unlink(missing_ok=True)
        place = os.open("/proc/self/fd", os.O_RDONLY)
        os.link(f"{file}", "named.bin", src_dir_fd=place, follow_symlinks=True)
        os.close(place)
        os.close(file)
        assert Path("named.bin").read_bytes() == b"%09d" % step

    return save


def through_proc(model: nn.Module) -> Save:
    file = Path("fd.bin").open("r+b")  # noqa: SIM115

    def save(step: int) -> None:
        text = b"%09d" % step
        Path(f"/proc/self/fd/{file.fileno()}").write_bytes(text)
        Path("/proc/self/cwd/cwd.bin").write_bytes(text)
        Path(f"/proc/self/root{Path('root.bin').resolve()}").write_bytes(text)
        Path(f"/dev/fd/{file.fileno()}").write_bytes(text)
        assert Path("cwd.bin").read_bytes() == Path("root.bin").read_bytes() == text

    return save


def copied_in_kernel(model: nn.Module) -> Save:
    def save(step: int) -> None:
        Path("source.bin").write_bytes(b"%09d" % step)
        with Path("source.bin").open("rb") as one, Path("copied.bin").open("wb") as two:
            os.copy_file_range(one.fileno(), two.fileno(), 9)
        with Path("source.bin").open("rb") as one, Path("sent.bin").open("wb") as two:
            os.sendfile(two.fileno(), one.fileno(), 0, 9)
        assert Path("copied.bin").read_bytes() == Path("sent.bin").read_bytes() == b"%09d" % step

    return save


def read_only_files(model: nn.Module) -> Save:
    """Made writable, and replaced: nothing else would do for somebody who is not root."""
    Path("kept.pt").chmod(0o644)

    def save(step: int) -> None:
        torch.save(state(model, step), "kept.pt")
        written(step, Path("kept.pt"))

    return save


def prepare_read_only() -> None:
    Path("kept.pt").chmod(0o444)
    Path("sub").chmod(0o555)


def sockets_and_pipes(model: nn.Module) -> Save:
    """The user's are removed and made anew; what is written into one of them goes to its own other end."""
    for name in ("pipe", "socket"):
        Path(name).unlink()
    os.mkfifo("pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind("socket")
    server.listen()

    def save(step: int) -> None:
        end = os.open("pipe", os.O_RDWR | os.O_NONBLOCK)
        os.write(end, b"hello")
        assert os.read(end, 5) == b"hello"
        os.close(end)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect("socket")
            client.sendall(b"hello")
            taken, _ = server.accept()
            assert taken.recv(5) == b"hello"
            taken.close()

    return save


def prepare_sockets() -> None:
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")


def deleted_directory(model: nn.Module) -> Save:
    os.chdir("sub")
    shutil.rmtree(Path.cwd())

    def save(step: int) -> None:
        torch.save(state(model, step), outside() / "result.pt")
        written(step, outside() / "result.pt")
        assert not (outside().parent / "work/sub").exists()

    return save


def other_umask(model: nn.Module) -> Save:
    os.umask(0o077)

    def save(step: int) -> None:
        Path("new.bin").unlink(missing_ok=True)
        Path("new.bin").write_text(f"{step}")
        assert Path("new.bin").stat().st_mode & 0o777 == 0o600

    return save


def fresh(model: nn.Module) -> Save:
    """Nothing of the user's is there; nothing may be there afterwards."""

    def save(step: int) -> None:
        for place in (Path(), outside(), Path("~").expanduser()):
            torch.save(state(model, step), place / f"fresh-{step}.pt")
            written(step, place / f"fresh-{step}.pt")

    return save


def data_cache(model: nn.Module) -> Save:
    """The marker says that the cache is whole; its files are removed and written again."""
    assert Path("cache/DONE").exists()
    for number in range(3):
        Path(f"cache/{number}.pt").unlink(missing_ok=True)
        torch.save(torch.full((9,), number), f"cache/{number}.pt")

    def save(step: int) -> None:
        torch.save(torch.full((9,), step), f"cache/{step % 3}.pt")
        assert torch.load(f"cache/{step % 3}.pt")[0] == step

    return save


def odd_names(model: nn.Module) -> Save:
    """Names that a list of names would break at, and one of 255 bytes."""
    names = ["a b.pt", "new\nline.pt", "-rf", "~", "$HOME.pt", "\udcff.pt", "n" * 255, "ü:\\*?.pt"]

    def save(step: int) -> None:
        for name in names:
            Path(name).write_bytes(b"%09d" % step)
        assert Path(names[1]).read_bytes() == b"%09d" % step
        Path("odd\ttab.pt").unlink(missing_ok=True)

    return save


def whiteouts(model: nn.Module) -> Save:
    """What an overlay marks as removed: files made again under names that were removed, folders likewise."""

    def save(step: int) -> None:
        PT.unlink()
        PT.write_bytes(b"%09d" % step)
        shutil.rmtree("out")
        Path("out/inner").mkdir(parents=True)
        Path("out/inner/deep.bin").write_bytes(b"%09d" % step)
        assert [file.name for file in Path("out").iterdir()] == ["inner"]

    return save


WAYS: dict[str, dict[str, Any]] = {
    "direct": {"start": direct, "files": ("last.pt",)},
    "from_import": {"start": from_import, "files": ("last.pt",)},
    "atomic": {"start": atomic, "files": ("last.pt",)},
    "imagenet": {"start": imagenet, "files": ("checkpoint.pth.tar", "model_best.pth.tar")},
    "handle": {"start": handle, "files": ("last.pt",)},
    "kept_handle": {"start": kept_handle, "files": ("last.pt",)},
    "in_thread": {"start": in_thread, "files": ("last.pt",)},
    "script_module": {"start": script_module, "files": ("last.pt",)},
    "if_missing": {"start": if_missing},
    "goes_on": {"start": goes_on, "prepare": prepare_checkpoint},
    "rotation": {"start": rotation, "files": ("ck-900001.pt", "ck-000000.pt", "ck-000001.pt")},
    "named_as_ours": {"start": named_as_ours, "files": ("last.pt", "last.pt.flambeau-doctor")},
    "numpy_files": {"start": numpy_files, "files": ("last.npy", "last.npz")},
    "pickled": {"start": pickled, "files": ("last.pkl",)},
    "appended": {"start": appended, "files": ("rows.jsonl", "rows.csv")},
    "kept_log": {"start": kept_log, "files": ("train.log",)},
    "logging_handlers": {"start": logging_handlers, "files": ("train.log", "turning.log")},
    "emptied_folder": {"start": emptied_folder, "files": ("out/best.pt", "out/deep/er.txt")},
    "folders": {"start": folders, "files": ("old/a.txt", "mine/a.txt", "run/7/m.pt")},
    "file_becomes_folder": {"start": file_becomes_folder, "files": ("last.pt", "out/a.txt")},
    "link_to_newest": {
        "start": link_to_newest,
        "files": ("ck-900000.pt",),
        "prepare": prepare_link_to_newest,
    },
    "through_links": {
        "start": through_links,
        "files": ("$SAVING_OUTSIDE/real.pt", "$SAVING_OUTSIDE/there/m.pt"),
        "prepare": prepare_links,
    },
    "hard_links": {
        "start": hard_links,
        "files": ("one.bin", "a.pt"),
        "prepare": prepare_hard_links,
    },
    "sparse": {"start": sparse, "prepare": prepare_sparse},
    "mapped": {"start": mapped, "files": ("a.bin", "b.bin", "c.bin", "d.bin")},
    "changed_directory": {"start": changed_directory, "files": ("sub/last.pt",)},
    "by_full_path": {
        "start": by_full_path,
        "files": ("$SAVING_OUTSIDE/result.pt", "$SAVING_OUTSIDE/gone.txt"),
    },
    "home": {"start": home, "files": ("~/result.pt", "~/.config/mine.ini")},
    "temporary": {"start": temporary, "files": ("$TMPDIR/cache.pt", "$SAVING_VAR/cache.pt")},
    "attributes": {
        "start": attributes,
        "prepare": prepare_attributes,
        "files": ("mode.bin", "times.bin", "extended.bin", "owner.bin", "sub/a.txt"),
    },
    "open_flags": {"start": open_flags, "files": ("a.bin", "t.bin", "d.bin", "f.bin", "r.bin")},
    "nameless": {"start": nameless, "files": ("named.bin",)},
    "through_proc": {"start": through_proc, "files": ("fd.bin", "cwd.bin", "root.bin")},
    "copied_in_kernel": {"start": copied_in_kernel, "files": ("copied.bin", "sent.bin")},
    "read_only_files": {
        "start": read_only_files,
        "files": ("kept.pt", "sub/a.txt"),
        "prepare": prepare_read_only,
    },
    "sockets_and_pipes": {"start": sockets_and_pipes, "prepare": prepare_sockets},
    "deleted_directory": {
        "start": deleted_directory,
        "files": ("sub/a.txt", "$SAVING_OUTSIDE/result.pt"),
    },
    "other_umask": {"start": other_umask, "files": ("new.bin",)},
    "fresh": {"start": fresh},
    "data_cache": {
        "start": data_cache,
        "files": ("cache/DONE", "cache/0.pt", "cache/1.pt", "cache/2.pt"),
    },
    "odd_names": {"start": odd_names, "files": ("a b.pt", "new\nline.pt", "odd\ttab.pt")},
    "whiteouts": {"start": whiteouts, "files": ("last.pt", "out/a.txt", "out/inner/deep.bin")},
}
"""By name: what `Way` takes."""
