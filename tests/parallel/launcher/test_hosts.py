"""Two hosts for real: network namespaces with addresses and host names of their own on one machine."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

PORT = 29400
MODEL = """
import os
import time

from torch import nn


class Slow(nn.Sequential):
    def forward(self, x):
        time.sleep(float(os.environ.get("SLEEP_S", "0")))
        return super().forward(x)


def build(num_classes, channels):
    return Slow(
        nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, num_classes),
    )
"""


class Hosts:
    """Machines 0 and 1, 10.77.0.1 and 10.77.0.2, behind one switch."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._started: list[subprocess.Popen[str]] = []

    def connect(self) -> None:
        """Make them.

        Raises:
            subprocess.CalledProcessError: not allowed here.
        """
        ip("link", "add", self._switch, "type", "bridge")
        ip("link", "set", self._switch, "up")
        for number in (0, 1):
            name, link = self.name(number), self._link(number)
            ip("netns", "add", name)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", link, "master", self._switch, "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def name(self, number: int) -> str:
        return f"{self._prefix}-{number}"

    @property
    def _switch(self) -> str:
        return f"{self._prefix}s"

    def _link(self, number: int) -> str:
        return f"{self._prefix}l{number}"

    def cut(self, number: int, *, is_cut: bool = True) -> None:
        """Pull the cable of a host, or put it back."""
        ip("link", "set", self._link(number), "down" if is_cut else "up")

    def run(self, number: int, *words: str | Path, sleep_s: float = 0.0) -> subprocess.Popen[str]:
        """Start a flambeau command on a host."""
        named = f'hostname host-{"ab"[number]}; exec "$@"'
        command = [
            "ip", "netns", "exec", self.name(number), "unshare", "--uts", "sh", "-c", named, "sh",
            sys.executable, "-m", "flambeau", *map(str, words),
        ]  # fmt: skip
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "SLEEP_S": f"{sleep_s}", "OMP_NUM_THREADS": "1"},
        )
        self._started.append(process)
        return process

    def processes(self) -> list[int]:
        """All that run on the hosts."""
        return [
            int(pid) for number in (0, 1) for pid in ip("netns", "pids", self.name(number)).split()
        ]

    def remove(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()
            assert process.stdout is not None
            process.stdout.close()
        for number in (0, 1):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", self.name(number))
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", self._switch)


def ip(*words: str) -> str:
    """The command `ip`."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if sys.platform != "linux" or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs Linux with ip and unshare")
    made = Hosts(f"fl{os.getpid() % 100000}")
    try:
        made.connect()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    yield made
    made.remove()


@pytest.fixture
def training(tmp_path: Path, make_images: Callable[..., Path]) -> list[str]:
    """A small training, as the words of a command without its folder."""
    make_images(tmp_path / "data" / "train", per_class=13)
    make_images(tmp_path / "data" / "val", per_class=5, seed=1)
    (tmp_path / "slow.py").write_text(MODEL)
    return [
        "train", str(tmp_path / "data"), "--model", f"{tmp_path / 'slow.py'}:build", "--duration", "16ep",
        "--batch-size", "6", "--precision", "fp32", "--device", "cpu", "--log-every", "1",
        "--checkpoint-every", "4ep", "--stall-timeout", "4",
    ]  # fmt: skip


def launch(
    hosts: Hosts, number: int, training: list[str], out: Path, **settings: float
) -> "subprocess.Popen[str]":
    return hosts.run(
        number, "launch", "--nnodes", "2", "--procs", "1", "--rdzv", f"10.77.0.1:{PORT}",
        "--node-rank", f"{number}", "--", *training, "--out", out, **settings,
    )  # fmt: skip


@pytest.mark.slow  # 50 s of waiting; `.ci/run` runs it
def test_two_hosts_train_as_one_survive_a_cut_and_go_on(
    hosts: Hosts, training: list[str], tmp_path: Path, flambeau: Callable[..., object]
) -> None:
    out, one = tmp_path / "two", tmp_path / "one"
    first, second = (launch(hosts, n, training, out, sleep_s=0.1) for n in (0, 1))
    wait_for_steps(out, 22, first)
    hosts.cut(1)
    said = [process.communicate(timeout=300)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [1, 1], said
    # Each side knows only that the other has fallen silent, and says who and where.
    assert re.search(r"rank 1 of 2 \(host host-b.*", said[0].splitlines()[-1]), said[0]
    assert re.search(r"host-a|10\.77\.0\.1", said[1].splitlines()[-1]), said[1]
    assert "Traceback" not in said[0] + said[1]
    assert not hosts.processes()

    hosts.cut(1, is_cut=False)
    first, second = (launch(hosts, n, training, out) for n in (0, 1))
    said = [process.communicate(timeout=300)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert "going on from step 20" in said[0]
    assert said[1].strip() == ""  # rank 0 alone speaks

    flambeau(*training, "--out", one)
    torch.testing.assert_close(
        load_file(out / "model.safetensors"),
        load_file(one / "model.safetensors"),
        rtol=1e-3,
        atol=1e-5,
    )
    results = [json.loads((folder / "result.json").read_text()) for folder in (out, one)]
    assert results[0]["metrics"] == pytest.approx(results[1]["metrics"], rel=1e-3)


def wait_for_steps(out: Path, steps: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 300
    metrics = out / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {steps},' in metrics.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
