"""Runs scripts of others on made-up data, each in a process that can write nowhere but in its own folder.

    unshare --net --map-root-user python bench/lint_round_trip_driver.py < jobs.jsonl > outcomes.jsonl

A job names a folder, a script in it and its arguments. No script is edited; what its machine lacks is made up
for all alike: torchvision's data sets (random pixels, the right shapes), images and texts that are not there,
pretrained weights, a GPU (`.cuda()` does nothing), and packages that are not installed, but never a part of
torch's own. A DataLoader ends after four batches and 64 samples, so that a script comes to its tests.
An outcome is 'ran' once a script has ended by itself, has made eight steps of an optimizer, or has made one
and is still running when its time is up; else it is 'failed' with the error, or 'late'.
"""

import builtins
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import pty
import random
import runpy
import select
import signal
import sys
import tempfile
import termios
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from flambeau.sandbox.landlock import write_only_below

BATCHES = 4
EPOCH_SAMPLES = 64
STEPS = 8
LIMIT_S = 15.0
SAMPLES = 640
FOLDER_IMAGES = 256
WORDS = ["we", "carry", "the", "torch", "by", "hand", "and", "it", "burns"]
OWN = ("torch", "torchvision", "torchaudio", "torchtext")


class Anything:
    """A part of a package that is not here: it takes every call and does nothing."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        pass

    def __call__(self, *args: Any, **keywords: Any) -> "Anything":
        return self

    def __getattr__(self, name: str) -> "Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: object) -> "Anything":
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False  # matplotlib asks `tensorflow.is_tensor`

    def __enter__(self) -> "Anything":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (object,)


class Package(types.ModuleType):
    """A package that is not here."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class MissingPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: a stub for packages that the script imports and that are not here at all."""

    def __init__(self, packages: set[str]) -> None:
        self._packages = packages.difference(OWN)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        root = sys.modules.get(name.partition(".")[0])
        if name.partition(".")[0] not in self._packages or (root and not isinstance(root, Package)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Package:
        return Package(spec.name)  # a package: its spec gives it a __path__

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class NoWeights(OrderedDict[str, torch.Tensor]):
    """The weights of a file that cannot be downloaded: a model that reads them stays as it is."""


def make_up_weights() -> None:
    load = torch.nn.Module.load_state_dict

    def load_state_dict(self: torch.nn.Module, state_dict: Any, *args: Any, **keywords: Any) -> Any:
        if not isinstance(state_dict, NoWeights):
            return load(self, state_dict, *args, **keywords)
        inspect.signature(load).bind(self, state_dict, *args, **keywords)
        return None

    def no_weights(*args: Any, **keywords: Any) -> NoWeights:
        return NoWeights()

    torch.nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
    torchvision.models.WeightsEnum.get_state_dict = no_weights
    torch.hub.load_state_dict_from_url = no_weights
    torch.utils.model_zoo.load_url = no_weights


class OnCpu(TorchFunctionMode):
    """Tensors that are made on a GPU, or moved there by `.to()`, are on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        if func is torch.Tensor.to:
            places = [str(one) if isinstance(one, (str, torch.device)) else "" for one in args]
            args = tuple(
                "cpu" if place.startswith("cuda") else one
                for one, place in zip(args, places, strict=True)
            )
        return func(*args, **named)


def make_up_gpu() -> None:
    def tensor_cuda(
        self: Any, device: Any = None, non_blocking: bool = False, memory_format: Any = None
    ) -> Any:
        return self

    def module_cuda(self: Any, device: Any = None) -> Any:
        return self

    torch.Tensor.cuda = tensor_cuda  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = module_cuda  # type: ignore[method-assign]
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *args: None)
    for name in ("Float", "Double", "Half", "Long", "Int", "Byte", "Bool"):
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


def make_up_vision_data() -> None:
    """Data sets of torchvision whose files are not here; the classes, and what they take, are its own."""
    sets = torchvision.datasets
    rng = np.random.default_rng(0)

    def pixels(*shape: int) -> np.ndarray[Any, Any]:
        return rng.integers(0, 256, (SAMPLES, *shape), np.uint8)

    def labels(count: int) -> list[int]:
        return [int(one) for one in rng.integers(0, count, SAMPLES)]

    def idx(self: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(pixels(28, 28)), torch.tensor(labels(10))

    sets.MNIST._check_exists = lambda self: True  # type: ignore[method-assign]
    sets.MNIST._load_data = idx  # type: ignore[method-assign]
    sets.MNIST.download = lambda self: None  # type: ignore[method-assign]

    def arrays(kind: type, attribute: str, count: int, shape: tuple[int, ...]) -> None:
        signature = inspect.signature(kind.__init__)  # type: ignore[misc]

        def init(self: Any, *args: Any, **keywords: Any) -> None:
            told = signature.bind(self, *args, **keywords).arguments
            sets.VisionDataset.__init__(
                self,
                told["root"],
                transform=told.get("transform"),
                target_transform=told.get("target_transform"),
            )
            self.data = pixels(*shape)
            setattr(self, attribute, labels(count))
            self.train = told.get("train", True)
            self.classes = [f"class {number}" for number in range(count)]

        kind.__init__ = init  # type: ignore[misc]

    arrays(sets.CIFAR100, "targets", 100, (32, 32, 3))  # before the class that it takes after
    arrays(sets.CIFAR10, "targets", 10, (32, 32, 3))
    arrays(sets.SVHN, "labels", 10, (3, 32, 32))
    arrays(sets.STL10, "labels", 10, (3, 96, 96))


class Digits:
    """A part of the MNIST of TensorFlow's old tutorials, which scripts of other frameworks took as well."""

    def __init__(self, one_hot: bool) -> None:
        rng = np.random.default_rng(0)
        self.images = rng.random((SAMPLES, 784), np.float32)
        labels = rng.integers(0, 10, SAMPLES)
        self.labels = np.eye(10)[labels] if one_hot else labels
        self.num_examples = SAMPLES

    def next_batch(self, count: int) -> tuple[Any, Any]:
        rows = np.random.default_rng(0).integers(0, SAMPLES, count)
        return self.images[rows], self.labels[rows]


def make_up_tensorflow_digits() -> None:
    def read_data_sets(folder: str, one_hot: bool = False, **keywords: Any) -> Any:
        parts = {part: Digits(one_hot) for part in ("train", "validation", "test")}
        return types.SimpleNamespace(**parts)

    name = "tensorflow.examples.tutorials.mnist"
    digits = Package(name)
    digits.input_data = types.ModuleType(f"{name}.input_data")  # type: ignore[assignment]
    digits.input_data.read_data_sets = read_data_sets  # type: ignore[attr-defined]
    sys.modules.update({name: digits, f"{name}.input_data": digits.input_data})
    for parent in ("tensorflow", "tensorflow.examples", "tensorflow.examples.tutorials"):
        sys.modules[parent] = Package(parent)


def image_file(path: str | os.PathLike[str]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    array = np.random.default_rng(0).integers(0, 256, (96, 96, 3), np.uint8)
    Image.fromarray(array).save(path, format="PNG")


def make_up_files() -> None:
    """Folders of images, images and texts that a script reads and does not have."""
    folder_init = torchvision.datasets.ImageFolder.__init__
    image_open = Image.open
    real_open = builtins.open

    def init(self: Any, root: Any, *args: Any, **keywords: Any) -> None:
        if not Path(root).is_dir():
            for number in range(FOLDER_IMAGES):
                image_file(Path(root) / f"class{number % 2}" / f"{number}.png")
        folder_init(self, root, *args, **keywords)

    def open_image(path: Any, *args: Any, **keywords: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and not Path(path).exists():
            image_file(path)
        return image_open(path, *args, **keywords)

    def open_text(path: Any, mode: str = "r", *args: Any, **keywords: Any) -> Any:
        is_text = isinstance(path, (str, os.PathLike)) and mode in ("r", "rt")
        if is_text and Path(path).suffix in (".txt", ".tsv", "") and not Path(path).exists():
            words = random.Random(0).choices(
                ["we", "carry", "the", "torch", "by", "hand", "and", "it", "burns"], k=4000
            )
            lines = [" ".join(words[start : start + 10]) for start in range(0, len(words), 10)]
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return real_open(path, mode, *args, **keywords)

    torchvision.datasets.ImageFolder.__init__ = init  # type: ignore[method-assign]
    Image.open = open_image
    builtins.open = open_text


def shorten_epochs() -> None:
    init = DataLoader.__init__
    iterate = DataLoader.__iter__
    count = DataLoader.__len__
    iterator = type(iter(DataLoader([0]))).__mro__[1]  # type: ignore[arg-type,var-annotated]
    next_batch = iterator.__next__
    signature = inspect.signature(init)

    def without_workers(self: Any, *args: Any, **keywords: Any) -> None:
        told = signature.bind(self, *args, **keywords)
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory"):
            told.arguments.pop(name, None)
        init(*told.args, **told.kwargs)

    def most(self: Any) -> int:
        return max(BATCHES, EPOCH_SAMPLES // (self.batch_size or 1))

    def short(self: Any) -> Any:
        batches = iterate(self)
        batches.num_left = most(self)
        return batches

    def length(self: Any) -> int:  # some ask for as many batches as it says
        return min(count(self), most(self))

    def next_or_end(self: Any) -> Any:
        self.num_left -= 1
        if self.num_left < 0:
            raise StopIteration
        return next_batch(self)

    DataLoader.__init__ = without_workers  # type: ignore[method-assign]
    DataLoader.__iter__ = short  # type: ignore[method-assign]
    DataLoader.__len__ = length  # type: ignore[method-assign]
    iterator.__next__ = next_or_end


def run_script(job: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """In its own process, which ends here."""
    folder = Path(job["folder"])
    script = folder / job["script"]
    write_only_below([str(folder), "/dev/null", "/dev/shm"])
    home = folder / "home"
    home.mkdir(exist_ok=True)
    os.environ.update(HOME=str(home), TMPDIR=str(home), TORCH_HOME=str(home))
    tempfile.tempdir = str(home)
    os.chdir(script.parent)
    sys.argv = [script.name, *job["arguments"]]
    sys.meta_path.append(MissingPackages(set(job["packages"])))
    if "tensorflow" in job["packages"]:
        make_up_tensorflow_digits()
    sys.path[:0] = [str(script.parent), str(folder)]
    steps = 0

    def count_step(*args: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            answer(
                {"outcome": "ran", "how": "still running"}
            )  # unless a later answer says otherwise
        if steps > STEPS:
            answer({"outcome": "ran", "how": f"{STEPS} steps"})
            os._exit(0)

    register_optimizer_step_pre_hook(count_step)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    try:
        with OnCpu():
            runpy.run_path(script.name, run_name="__main__")
        answer({"outcome": "ran", "how": f"ended after {steps} steps"})
    except SystemExit as error:
        word = "ran" if error.code in (None, 0) else "failed"
        answer({"outcome": word, "how": f"exit code {error.code}", "error": "SystemExit"})
    except BaseException as error:
        answer({"outcome": "failed", "steps": steps, **described(error, folder)})
    os._exit(0)


def described(error: BaseException, folder: Path) -> dict[str, Any]:
    """Its class and message, and the last line of the script's own that led to it."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        path = Path(name).absolute()
        if path.is_relative_to(folder):
            place = f"{path.relative_to(folder)}:{trace.tb_lineno}"
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        place = f"{Path(str(error.filename)).name}:{error.lineno}"
    lines = str(error).strip().splitlines() or [""]
    text = lines[0].replace(str(folder), "").strip()[:160]
    return {"error": type(error).__name__, "message": text, "place": place}


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """The last answer of the job's process, within its time."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.setsid()
        os.close(reader)
        nothing = os.open(os.devnull, os.O_RDWR)
        _, terminal = pty.openpty()  # some ask `stty size`
        termios.tcsetwinsize(terminal, (24, 80))
        for number, file in enumerate((terminal, nothing, nothing)):
            os.dup2(file, number)
        run_script(job, lambda row: void(os.write(writer, json.dumps(row).encode() + b"\n")))
    os.close(writer)
    end = time.monotonic() + job.get("limit_s", LIMIT_S)
    data = b""
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select([reader], [], [], left)
        part = os.read(reader, 65536) if ready else b""
        if ready and not part:
            break
        data += part
    is_late = left <= 0
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    os.close(reader)
    rows = [json.loads(line) for line in data.splitlines()]
    last = rows[-1] if rows else {"outcome": "late" if is_late else "failed", "error": "no answer"}
    if last.get("how") == "still running" and not is_late:
        last = {"outcome": "failed", "error": f"ended with status {status}"}
    return {**job, **last}


def void(value: object) -> None:
    """Drop it."""


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    torch.set_num_threads(1)
    with suppress(ImportError):
        import pytorch_lightning  # noqa: F401
    # Files first: torchvision's own ImageFolder opens images.
    make_up_files()
    make_up_vision_data()
    make_up_weights()
    make_up_gpu()
    shorten_epochs()
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
