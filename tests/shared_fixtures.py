"""What tests share: a process left as it was found, small images, ranks, the command called in process."""

import contextlib
import datetime
import faulthandler
import gc
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer of a process imports it, in a second: once here, not in each fork
import torch.distributed
import torch.utils.deterministic
from PIL import Image

import forked_python as forked
from flambeau.cli import table
from flambeau.cli.command import main
from flambeau.data.sources import open_data
from flambeau.recipes.data.recordio import RecordReader, RecordWriter
from json_schemas import compared

# If a process uses FakeTensorMode before its first backward pass, that pass starts threads of autograd, and
# a rank that is forked from it then can run none.
torch.ones((), requires_grad=True).backward()


@pytest.fixture(autouse=True, scope="session")
def own_data_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Copies of Parquet files go where tests leave things, not into the user's cache."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FLAMBEAU_DATA", str(tmp_path_factory.mktemp("data_home")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """No test cuts the power: what was written outlives every process that a test kills, synced or not.

    A seventh of the time of all tests went into it. Those of what is synced, and in which order, put a disk
    of their own in its place; those in tests/recipes/checkpoints sync, as does the command in a process of
    its own.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", forked.unsynced)
        yield


EMBEDDED = open_data.EMBEDDED
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@pytest.fixture(autouse=True)
def _process_as_it_was(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Beside NCCL gloo's threads outlive their group; tests of a GPU run where nothing is forked.
    with process_as_it_was(may_leave_group=request.node.get_closest_marker("gpu") is not None):
        yield


@pytest.fixture(scope="session")
def kept_process() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """The function `process_as_it_was`, for fixtures that train and outlive a test."""
    return process_as_it_was


@contextlib.contextmanager
def process_as_it_was(*, may_leave_group: bool = False) -> Iterator[None]:
    """The command sets all of this for its whole process, which here is that of all tests."""
    threads = torch.get_num_threads()
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    newest, before = next(reversed(sys.modules)), _threads()
    yield
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    torch.set_rng_state(generators[2])
    torch.cuda.set_rng_state_all(cuda)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
    for number, handler in handlers.items():
        signal.signal(number, handler)
    # Of ten thousand modules the new ones are the last.
    for name in list(itertools.takewhile(lambda name: name != newest, reversed(sys.modules))):
        if name.startswith(("flambeau_model_", "flambeau_data_")):
            del sys.modules[name]
    if may_leave_group:
        return
    if _has_group(_threads() - before):
        gc.collect()  # a traceback may hold it
    assert not _has_group(_threads() - before), (
        "this test leaves a process group behind; a fork beside gloo's threads can hang, so join it in a rank"
    )


def _threads() -> set[str]:
    """Of this process, by their numbers; none where there is no /proc."""
    tasks = "/proc/self/task"
    return set(os.listdir(tasks)) if os.path.isdir(tasks) else set()  # noqa: PTH208, PTH112


def _has_group(threads: set[str]) -> bool:
    """Whether some of these threads are those of a gloo group."""
    names = []
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(Path(f"/proc/self/task/{thread}/comm").read_text())
    return any("gloo" in name for name in names)


@pytest.fixture(scope="session")
def forked_command() -> Any:
    """`start_command`: `flambeau` in a process of its own that need not load torch again."""
    return forked.start_command


@pytest.fixture(scope="session")
def forked_python() -> Any:
    """The class `ForkedPython`: the same for any Python."""
    return forked.ForkedPython


@pytest.fixture(scope="session")
def run_python() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """`run_python("-c", code)`: the same as `subprocess.run` does it; see tests/forked_python.py."""
    return forked.run_python


class Answer(NamedTuple):
    """What a command gave: its exit code and what it printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Answer]


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of moto's server of S3 on loopback."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patched:
        # It writes a line per request to what was standard error when it began, and a traceback later on.
        patched.setattr(logging.getLogger("werkzeug"), "disabled", True)
        yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of that server, whose address and keys are in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    import boto3

    return boto3.client("s3")


@pytest.fixture
def flambeau(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Call the command: `flambeau("train", folder, "--duration 4st")`; texts are split as a shell does.

    What it prints with `--json` is compared with the schema of the command.
    """
    monkeypatch.setattr(table, "json_facts", compared(table.json_facts))

    def call(*words: str | os.PathLike[str]) -> Answer:
        arguments = [
            part
            for word in words
            for part in (shlex.split(word) if isinstance(word, str) else [str(word)])
        ]
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as error:
            assert isinstance(error.code, int)
            code = error.code
        return Answer(code, *capsys.readouterr())

    return call


def write_images(
    root: Path, *, classes: str = "ab", per_class: int = 8, size: int = 8, seed: int = 0
) -> Path:
    """A folder of grey PNG files of noise, in each class of another brightness; all of the same length."""
    generator = np.random.default_rng(seed)
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for index in range(per_class):
            low = 100 * label
            pixels = generator.integers(low, low + 120, (size, size), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index:02}.png", compress_level=0)
    return root


@pytest.fixture
def make_images() -> Callable[..., Path]:
    """The function `write_images`."""
    return write_images


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """train/ and val/ with classes a and b, of 8 and 4 images of 8 x 8 pixels each."""
    write_images(tmp_path / "images" / "train")
    write_images(tmp_path / "images" / "val", per_class=4, seed=1)
    return tmp_path / "images"


def write_photos(root: Path) -> Path:
    """A folder of 18 JPEG files of different sizes; one is CMYK, one grey, one turned by its EXIF tag."""
    y, x = np.mgrid[:120, :120]
    for label, name in enumerate(("ant", "bee", "cat")):
        (root / name).mkdir(parents=True)
        for index in range(6):
            planes = [x * (label + 1) + 20 * index, y * (3 - label) + 9 * index, x + y + 40 * label]
            height, width = 70 + 7 * index, 110 - 6 * index
            image = Image.fromarray(np.stack(planes, 2)[:height, :width].astype(np.uint8))
            if index < 2:
                image = image.convert(("CMYK", "L")[index])
            exif = Image.Exif()
            if index == 2:
                exif[0x0112] = 6
            image.save(root / name / f"{index}.jpg", exif=exif)
    return root


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of JPEG photos, see `write_photos`."""
    return write_photos(tmp_path / "photos")


@pytest.fixture(scope="session")
def every_tenth_embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed like the embedded images: every tenth of them, 600 to train on and 100 to evaluate on."""
    few = tmp_path_factory.mktemp("embedded") / EMBEDDED.name
    shutil.copy(EMBEDDED.with_name("fashion_mnist.classes.txt"), few.parent)
    for part in ("train", "val"):
        name = f"fashion_mnist_{part}.rec"
        with RecordWriter(few.with_name(name)) as writer:
            for record in itertools.islice(RecordReader(EMBEDDED.with_name(name)), 0, None, 10):
                writer.write(record)
    return few


@pytest.fixture
def few_embedded(every_tenth_embedded: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tenth of the embedded images in place of all: decoding all takes a second, as often as it is done."""
    monkeypatch.setattr(open_data, "EMBEDDED", every_tenth_embedded)
    return every_tenth_embedded


@dataclass
class Job:
    """Ranks of one process group, forked from this process; see `start_ranks`."""

    processes: list[Any]
    _answers: list[Any]
    _stacks: list[Path]

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        os.kill(self.processes[rank].pid, number)

    def codes(self, timeout: float = 300.0) -> list[int]:
        """Exit codes when all have ended (minus the signal's number for a killed one)."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, "a rank has not ended in time"
        return [process.exitcode for process in self.processes]

    def results(self, timeout: float = 300.0) -> list[Any]:
        """What `work` has returned on each rank; a rank that raised fails the test with its traceback."""
        deadline = time.monotonic() + timeout
        found: list[Any] = []
        for rank, answer in enumerate(self._answers):
            left = max(0.0, deadline - time.monotonic())
            if not answer.poll(left):
                where = self._where()
                raise AssertionError(f"rank {rank} has not answered in {timeout} s\n{where}")
            try:
                good, value = pickle.loads(answer.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} ended without an answer") from None
            assert good, f"rank {rank}: {value}"
            found.append(value)
        return found

    def _where(self) -> str:
        """What the threads of all ranks do."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR2)
        time.sleep(1)
        texts = [path.read_text(encoding="utf-8") for path in self._stacks]
        return "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(texts))

    def stop(self) -> None:
        """Kill whatever is left."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


StartRanks = Callable[..., Job]


@pytest.fixture
def start_ranks(tmp_path: Path) -> Iterator[StartRanks]:
    """Start `work(*args)` on `world` ranks: `start_ranks(4, work, 1, 2).results()`.

    Each rank is a fork of this process with the environment that torchrun gives (RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR, MASTER_PORT ...); `work` may be a closure and joins the group itself, or asks
    for it with `group=True`. What it returns is pickled. All are killed at the end of the test.
    """
    jobs = []

    def start(
        world: int,
        work: Callable[..., Any],
        *args: Any,
        group: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> Job:
        port = _unused_port()
        context = multiprocessing.get_context("fork")
        processes, answers, stacks = [], [], []
        for rank in range(world):
            stacks.append(tmp_path / f"stacks-{len(jobs)}-{rank}")
            receiver, sender = context.Pipe(duplex=False)
            variables = {
                "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "GROUP_RANK": "0",
                "WORLD_SIZE": f"{world}", "LOCAL_WORLD_SIZE": f"{world}",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", **(environ or {}),
            }  # fmt: skip
            process = context.Process(
                target=_rank,
                args=(work, args, variables, group, sender, stacks[-1]),
                name=f"rank {rank}",
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
                process.start()
            sender.close()
            processes.append(process)
            answers.append(receiver)
        jobs.append(Job(processes, answers, stacks))
        return jobs[-1]

    yield start
    for job in jobs:
        job.stop()


_PORTS = itertools.count()


def _unused_port() -> int:
    """Of those that the system gives to nobody who asks for any, each test process has its own.

    A port that the system had given, and that was closed again, was now and then given to another test as
    well: two of its ranks then waited for a third that had joined ours.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 10_000 + worker % 20 * 1_000 + next(_PORTS) % 1_000
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def _rank(
    work: Callable[..., Any],
    args: Sequence[Any],
    environ: dict[str, str],
    group: bool,
    sender: Any,
    stacks: Path,
) -> None:
    """The life of one rank."""
    faulthandler.register(signal.SIGUSR2, file=stacks.open("w"))
    os.setpgid(0, 0)
    torch.set_num_threads(1)  # the threads of the process that was forked are not here
    if "torch._inductor.config" in sys.modules:  # nor is what torch.compile compiles with there
        sys.modules["torch._inductor.config"].compile_threads = 1  # type: ignore[attr-defined]
    os.environ.update(environ)
    if group:
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        torch.distributed.barrier()  # else a rank may end while another still connects to it
    try:
        answer = (True, work(*args))
    except Exception as error:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
        sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a script
        sys.exit(1)
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
