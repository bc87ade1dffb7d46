"""What an example of a rule needs around it to be run: made-up data before it, a call behind it.

An example shows a definition or a call as people write it; its driver makes it run on a CPU, alone.
"""

import builtins
import contextlib
import http.server
import inspect
import multiprocessing
import os
import pickle
import socket
import ssl
import struct
import subprocess
import sys
import threading
import urllib.error
import warnings
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Driver:
    """The lines before and behind an example.

    Those behind leave numbers in `out`, to be compared, or what the example did in `did`, which differs
    between the bad one and the good one.
    """

    after: str
    before: str = ""
    is_alone: bool = False  # in a process of its own


AS_IT_STANDS = Driver("")

_GROUP = (
    "import torch\n"
    "torch.distributed.init_process_group("
    "'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\n"
)
_WRAP = Driver(
    "import torch\nwrap(torch.nn.Linear(2, 2))(torch.ones(1, 2))\n", _GROUP, is_alone=True
)
_ANEW = "made.forget(%r)\n"
_FIT = Driver("did = made.calls_of(Net, 'fit')\n")
_VALIDATE = Driver("did = made.calls_of(Net, 'validate')\n")
_TEST = Driver("did = made.calls_of(Net, 'test')\n")
_RESET = Driver(
    "import contextlib\n"
    "with contextlib.suppress(RuntimeError):  # behind the warning, where no GPU has peaks\n"
    "    reset()\n"
)
_HUB = Driver("did = made.questions_of(net)\n", "made.repository()\n")
_FEW_CORES = Driver(
    "",
    "import warnings\nwarnings.filterwarnings('ignore', message='This DataLoader will create')\n",
)
_STEPS = "import torch\nx = torch.tensor([[3.0, 4.0]])\ny = torch.tensor([[9.0, -9.0]])\n"

DRIVERS: dict[str, Driver] = {
    "FLB157": Driver("export(torch.nn.ReLU().eval(), torch.ones(2))\n"),
    "FLB1101": Driver("import torch\nturn(torch.ones(1, 4, 4))\n"),
    "FLB1102": Driver("out = len(images(made.imagenet()))\n"),
    "FLB1140": _FIT,
    "FLB1141": _VALIDATE,
    "FLB1142": _TEST,
    "FLB1143": _FIT,
    "FLB1144": _VALIDATE,
    "FLB1145": _TEST,
    **{f"FLB{number}": _FIT for number in range(1146, 1153)},
    "FLB1186": _WRAP,
    "FLB1187": Driver(
        "import torch\n"
        "lengths = torch.tensor([2, 1]).as_subclass(made.Movable)\n"
        "pack(torch.ones(2, 2, 1), lengths)\n"
    ),
    "FLB1192": Driver("read(made.sound())\n"),
    "FLB1195": Driver("rate(made.sound())\n"),
    "FLB1197": Driver("out = digits(made.mnist())[0]\n"),
    "FLB249": Driver("out = torch.zeros(2)\ngather(out, torch.ones(2))\n", _GROUP, is_alone=True),
    "FLB250": Driver("out = torch.zeros(2)\nscatter(out, torch.ones(2))\n", _GROUP, is_alone=True),
    "FLB253": Driver("", _ANEW % "torch.distributed._sharded_tensor"),
    "FLB254": Driver("", _ANEW % "torch.distributed._shard.checkpoint"),
    "FLB255": Driver("write({'w': torch.ones(2)}, made.writer())\n", _GROUP, is_alone=True),
    "FLB256": Driver(
        "w = torch.zeros(2)\nread({'w': w}, made.reader())\nout = w\n", _GROUP, is_alone=True
    ),
    "FLB257": Driver("import torch\nshard(torch.nn.Linear(2, 2))\n", _GROUP, is_alone=True),
    "FLB258": _WRAP,
    "FLB261": Driver("out = net(torch.ones(2))\n", "made.exported()\n"),
    "FLB262": Driver("out = frozen(torch.nn.ReLU().eval(), torch.ones(2))(torch.ones(2))\n"),
    "FLB263": Driver(
        "out = net(torch.ones(2))\ntorch.compiler.set_stance('default')\n",
        "import torch\nmade.load_compiler()\ntorch.compiler.set_stance('force_eager')\n",
    ),
    "FLB278": Driver("", is_alone=True),  # torch warns once per process
    "FLB2163": Driver("", is_alone=True),
    "FLB287": Driver(
        "torch.sparse.check_sparse_tensor_invariants.disable()\n",
        "import torch\ntorch.sparse.check_sparse_tensor_invariants.enable()  # else torch asks for it\n",
    ),
    "FLB288": _RESET,
    "FLB289": _RESET,
    "FLB2139": _WRAP,
    "FLB2143": Driver("out = made.questions_of(net)\n", "made.repository()\n"),
    "FLB2145": Driver(
        "net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())\n"
        "hook(net)(torch.ones(2, requires_grad=True)).sum().backward()\n"
    ),
    "FLB2166": Driver("out = labels(made.mnist())\n"),
    "FLB2168": _WRAP,
    "FLB421": Driver(
        "import os\n"
        "did = os.environ.get('PYTHONHASHSEED') == '0' and hash('a') != made.hash_by_seed_0()\n"
    ),
    "FLB443": Driver(
        "net = torch.nn.Dropout(0.5)\nloader = [torch.ones(64)]\n"
        "did = torch.equal(validate(net, loader)[0], validate(net, loader)[0])\n"
    ),
    "FLB446": Driver("rest(torch.ones(2))\n"),
    "FLB450": Driver("train([(x, y)] * 2)\ndid = net.weight.tolist()\n", _STEPS),
    "FLB451": Driver(
        "scaler = torch.amp.GradScaler('cpu')\n"
        "step(net(torch.full((2,), 1e38)).sum(), torch.optim.SGD(net.parameters(), 0.1))\n"
        "did = scaler.get_scale()\n",
        "import warnings\nwarnings.filterwarnings('ignore', message='.*CUDA is not available')\n",
    ),
    "FLB452": Driver(
        "net = torch.nn.Linear(1, 1)\naccuracies = iter([0.9, *[0.1] * 8])\n\n\n"
        "def train(net):\n"
        "    with torch.no_grad():\n        net.weight.add_(1)\n"
        "    return next(accuracies)\n\n\n"
        "first = net.weight.item() + 1\nfit(net, train)\ndid = net.weight.item() == first\n"
    ),
    "FLB453": Driver("did = len(optimizer.param_groups[0]['params'])\n"),
    "FLB455": Driver("did = optimizer.param_groups[0]['lr']\n"),
    "FLB456": Driver("did = made.saved_by_two(fit)\n"),
    "FLB457": Driver(
        "did = bool(loss(torch.full((1, 2), 1e6), torch.tensor([0])) < 0)"
        " or bool(loss(torch.full((1, 2), 1e6), torch.tensor([1])) < 0)\n"
    ),
    "FLB458": Driver("loss(torch.full((1, 2), 1e3), torch.ones(1, 2))\n"),
    "FLB459": Driver(
        "work(0, 1)\n",
        "import os\n\nos.environ.update(MASTER_ADDR='localhost', MASTER_PORT='0')\n",
        is_alone=True,
    ),
    "FLB325": _FEW_CORES,
    "FLB462": _FEW_CORES,
    "FLB503": Driver("did = made.is_code_run_by(read, 'x.pt')\n"),
    "FLB504": Driver("did = made.is_replaced_on_the_way(read)\n"),
    "FLB505": _HUB,
    "FLB506": Driver("did = made.is_code_run_by(read, 'x.npy')\n"),
    "FLB604": Driver("out = torch.ones(2)\n"),
    "FLB605": Driver(
        "net = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "train(net, optimizer, [torch.ones(2)] * 3)\n"
        "out = net.weight\n"
    ),
    "FLB607": Driver(
        "kept = []\nnet = torch.nn.Linear(2, 2)\n"
        "net.register_forward_hook(lambda *args: kept.append(args[2].requires_grad))\n"
        "validate(net, [torch.ones(2)])\ndid = kept\n"
    ),
}
"""By the code of the rule; the examples of the others run as they stand."""

NO_GPU = "it needs a GPU"
_APEX = "apex is compiled for one CUDA and one torch, and is in no registry"

NOT_RUN: dict[str, dict[str, str]] = {
    "FLB1110": {"good": NO_GPU},
    "FLB1111": {"good": "it needs a TPU"},
    "FLB1163": {"good": "DeepSpeed is compiled with a CUDA toolkit"},
    "FLB1186": {"good": NO_GPU},
    **{f"FLB{number}": {"bad": _APEX} for number in (*range(177, 183), *range(2102, 2106))},
    "FLB257": {"bad": NO_GPU},
    "FLB2114": {"bad": NO_GPU, "good": NO_GPU},
    "FLB1196": {"bad": "torchtext has ended, and its newest needs torch 2.3"},
    "FLB407": {"bad": NO_GPU, "good": NO_GPU},
}
"""The examples that cannot be run on a CPU, and why: the bad one, the good one."""


# ---------------------------------------------------------------- what the drivers call


class Movable(torch.Tensor):
    """A tensor that has a GPU to go to: torch's `meta` device."""

    def cuda(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).to("meta")


def forget(module: str) -> None:
    """Its import runs it again."""
    for name in [one for one in sys.modules if one.startswith(module)]:
        del sys.modules[name]


def mnist() -> str:
    """Two digits, as the files of MNIST hold them."""
    folder = Path("MNIST/raw")
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        head = struct.pack(">4i", 0x803, 2, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(head + bytes(2 * 28 * 28))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i2B", 0x801, 2, 3, 4))
    return "."


def sound() -> str:
    """A tone of no length, almost."""
    with wave.open("sound.wav", "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(200))
    return "sound.wav"


def imagenet() -> str:
    """One image, in folders as those of ImageNet."""
    folder = Path("train/n01440764")
    folder.mkdir(parents=True)
    Image.new("RGB", (2, 2)).save(folder / "1.JPEG")
    torch.save(({"n01440764": ("tench",)}, ["n01440764"]), "meta.bin")
    return "."


def writer() -> Any:
    return torch.distributed.checkpoint.FileSystemWriter("checkpoint")


def reader() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save({"w": torch.ones(2)}, storage_writer=writer())
    return torch.distributed.checkpoint.FileSystemReader("checkpoint")


def load_compiler() -> None:
    """What torch 2.11 itself imports for torch.compile warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(torch.nn.ReLU())


def exported() -> None:
    """A model as a file of TorchScript, and as one of torch.export."""
    net = torch.nn.ReLU().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(net, torch.ones(2)), "net.pt")
    torch.export.save(torch.export.export(net, (torch.ones(2),)), "net.pt2")


def repository() -> None:
    """One of torch.hub that is here already, and whose host does not answer."""
    torch.hub.set_dir("hub")
    folder = Path("hub/a_b_main")
    folder.mkdir(parents=True)
    (folder / "hubconf.py").write_text("def net():\n    return 3\n")


def questions_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """What it gives, and how often it asks whether a repository is trusted."""
    asked = []
    away = mock.patch("torch.hub.urlopen", side_effect=urllib.error.URLError("away"))
    legacy = mock.patch("torch.hub.os.walk", return_value=iter([("hub", [], [])]))
    answers = mock.patch.object(builtins, "input", lambda text: asked.append(text) or "y")
    with away, legacy, answers:
        return call(), len(asked)


class _Code:
    """A pickle that runs code where it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("run",)


def is_code_run_by(read: Callable[..., Any], name: str) -> bool:
    if name.endswith(".npy"):
        np.save(name, np.array([_Code()], dtype=object), allow_pickle=True)
    else:
        torch.save(_Code(), name)
    module = [pickle] * (len(inspect.signature(read).parameters) - 1)
    with contextlib.suppress(ValueError, pickle.UnpicklingError):  # where it is refused
        read(name, *module)
    return Path("run").exists()


def is_replaced_on_the_way(read: Callable[[], Any]) -> bool:
    """Whether weights that somebody on the way has made are taken for those of the server."""
    torch.save({"from": "the server"}, "true.pth")
    torch.save({"from": "the way"}, "false.pth")
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=a.example -addext"
    files = "subjectAltName=DNS:a.example", "-keyout", "key.pem", "-out", "cert.pem"
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
    os.environ.pop("no_proxy", None)
    os.environ.pop("NO_PROXY", None)
    with _proxy("true.pth") as address, mock.patch.dict(os.environ, SSL_CERT_FILE="cert.pem"):
        assert _read_by(read, address) == {"from": "the server"}
    with _proxy("false.pth") as address:
        try:
            return bool(_read_by(read, address) == {"from": "the way"})
        except urllib.error.URLError as error:
            assert isinstance(error.reason, ssl.SSLCertVerificationError)
            return False


def _read_by(read: Callable[[], Any], proxy: str) -> Any:
    """What is downloaded through a proxy, and not found in a folder of torch.hub."""
    torch.hub.set_dir(f"hub{proxy.rpartition(':')[2]}")
    proxies = mock.patch.dict(os.environ, http_proxy=proxy, https_proxy=proxy)
    with proxies, mock.patch("urllib.request._opener", None):  # which keeps its first proxy
        return read()


@contextlib.contextmanager
def _proxy(file: str) -> Iterator[str]:
    """Answers any request with a file, over TLS where the client asks for it; the key is in `key.pem`."""
    answer = Path(file).read_bytes()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("cert.pem", "key.pem")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def do_CONNECT(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.close_connection = True
            with (
                contextlib.suppress(ssl.SSLError),  # the client does not trust it, and hangs up
                context.wrap_socket(self.connection, server_side=True) as channel,
                channel.makefile("rb") as self.rfile,
                channel.makefile("wb", 0) as self.wfile,
            ):
                self.handle_one_request()

        def log_message(self, *words: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def hash_by_seed_0() -> int:
    """The hash of 'a' in a Python that starts with the seed 0."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    words = [sys.executable, "-c", "print(hash('a'))"]
    return int(subprocess.run(words, env=environment, capture_output=True, check=True).stdout)


def saved_by_two(fit: Callable[..., Any]) -> int:
    """How many of two processes write the file."""
    port = _free_port()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(fit, rank, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    return len(list(Path().glob("saved-by-*")))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def _rank(fit: Callable[..., Any], rank: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="localhost", MASTER_PORT=f"{port}", WORLD_SIZE="2", RANK=f"{rank}"
    )
    with mock.patch("torch.save", lambda state, path: Path(f"saved-by-{rank}").touch()):
        fit(torch.nn.Linear(2, 2), lambda net: net(torch.ones(1, 2)))
    torch.distributed.destroy_process_group()


def calls_of(net: type, verb: str) -> list[str]:
    """Train, validate or test a LightningModule: those of its own methods that are called."""
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.utilities.warnings import PossibleUserWarning

    called: dict[str, None] = {}

    class Steps(LightningModule):
        """What a model needs to be trained at all."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.layer(batch)

        test_step = validation_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Whole(net, Steps):  # type: ignore[misc, valid-type]
        pass

    def note(frame: Any, event: str, value: Any) -> None:
        if event == "call" and frame.f_code in own:
            called[frame.f_code.co_name] = None

    own = {one.__code__ for one in vars(net).values() if inspect.isfunction(one)}
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    warnings.filterwarnings("ignore", message=".*`training_step` returned `None`")
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(max_epochs=1, accelerator="cpu", **dict.fromkeys(off, False))
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        getattr(trainer, verb)(Whole(), DataLoader(torch.ones(4, 2), batch_size=2))
    finally:
        sys.setprofile(before)
    return list(called)
