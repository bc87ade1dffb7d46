"""The job files of docs/jobs: run here, with what a cluster has replaced by a few lines of shell."""

import ast
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import kubernetes_validate
import numpy as np
import pytest
import yaml  # timm brings it
from PIL import Image

from flambeau.cli.command import check
from flambeau.data.pack.encode_images import Conversion
from flambeau.data.pack.pack import pack
from flambeau.data.pack.shard_plan import Split
from load_script import load_script

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="ranks are tied to the launcher by prctl"
)

JOBS = Path(__file__).parents[2] / "docs" / "jobs"

# `flambeau launch ... -- train ARGS` with a script in place of train.
FLAMBEAU = """#!/bin/bash
words=()
for word in "$@"; do
    [[ $word == train ]] && word=$SCRIPT
    words+=("$word")
done
exec {python} -m flambeau "${{words[@]}}"
"""
SCRIPT = """
import os, pathlib, signal, sys, time
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
def note(text):
    with open(f"rank-{rank}", "a") as file:
        file.write(text + "\\n")
def save(*_):
    note("saved")
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
note(f"{world} {sys.argv[1:]}")
pathlib.Path(f"ready-{rank}").touch()
while not os.path.exists("finish"):
    time.sleep(0.05)
"""
# Two nodes: tasks side by side; signals go to each of them; the highest exit code is that of all.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
    SLURM_NODEID=$node "$@" &
    tasks+=($!)
done
trap 'kill -USR1 "${tasks[@]}"' USR1
highest=0
for task in "${tasks[@]}"; do
    while true; do
        wait "$task"; code=$?
        kill -0 "$task" 2> /dev/null || break
    done
    ((code > highest)) && highest=$code
done
exit "$highest"
"""
SCONTROL = """#!/bin/bash
[[ $1 == show ]] && printf 'localhost\\nnode2\\n'
[[ $1 == requeue ]] && echo "$2" > requeued
exit 0
"""
SQUEUE = """#!/bin/bash
cat state
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a job in tmp_path: programs of a cluster come first."""
    (tmp_path / "bin").mkdir()
    programs = {"flambeau": FLAMBEAU.format(python=sys.executable), "srun": SRUN}
    for name, text in (programs | {"scontrol": SCONTROL, "squeue": SQUEUE}).items():
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "script.py").write_text(SCRIPT)
    return {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SCRIPT": str(tmp_path / "script.py"),
        "SLURM_JOB_ID": str(free_port() % 10000),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
    }


def until_ready(folder: Path, process: Any) -> None:
    deadline = time.monotonic() + 60
    while not all((folder / f"ready-{rank}").exists() for rank in range(2)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def notes(folder: Path) -> list[list[str]]:
    return [(folder / f"rank-{rank}").read_text().splitlines() for rank in range(2)]


@pytest.mark.parametrize("state", ["RUNNING", pytest.param("COMPLETING", marks=pytest.mark.slow)])
def test_slurm_job_goes_back_into_the_queue(
    state: str, cluster: dict[str, str], tmp_path: Path
) -> None:
    """Unless it was cancelled, when it is no longer running."""
    (tmp_path / "state").write_text(f"{state}\n")
    job = [str(JOBS / "slurm.sbatch"), "my photos", "--lr", "0.1"]
    process = subprocess.Popen(["bash", *job], cwd=tmp_path, env=cluster)
    until_ready(tmp_path, process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 75
    assert notes(tmp_path) == [["2 ['my photos', '--lr', '0.1']", "saved"]] * 2
    requeued = tmp_path / "requeued"
    if state == "RUNNING":
        assert requeued.read_text() == f"{cluster['SLURM_JOB_ID']}\n"
    else:
        assert not requeued.exists()


def test_slurm_script_asks_for_what_it_needs() -> None:
    """One launcher a node, a signal for the script alone and in time, and the right to be requeued."""
    text = (JOBS / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == "1"
    assert re.fullmatch(r"B:USR1@\d{3}", options["signal"])
    assert {"requeue", "nodes", "time"} <= options.keys()
    assert options["open-mode"] == "append"  # or the second start overwrites the log of the first
    assert text.index("#SBATCH") < text.index("host=")  # Slurm stops reading at the first command


def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text())
    return service, job["spec"]


def test_kubernetes_job_runs(cluster: dict[str, str], tmp_path: Path) -> None:
    """The command of the container, once for each index, with one name and one port replaced."""
    _, job = kubernetes()
    bash, flag, text = job["template"]["spec"]["containers"][0]["command"]
    text = text.replace("flambeau-0.flambeau:29500", f"localhost:{free_port()}")
    assert text.count("flambeau-0.flambeau") == 1
    text = text.replace("flambeau-0.flambeau", "localhost")
    (tmp_path / "finish").touch()
    pods = [
        subprocess.Popen(
            [bash, flag, text], cwd=tmp_path, env={**cluster, "JOB_COMPLETION_INDEX": str(index)}
        )
        for index in range(job["completions"])
    ]
    assert [pod.wait(60) for pod in pods] == [0, 0]
    assert notes(tmp_path) == [["2 ['/data/photos', '--out', '/runs/photos']"]] * 2


def test_kubernetes_file_fits_together() -> None:
    service, job = kubernetes()
    name, pod = service["metadata"]["name"], job["template"]["spec"]
    container = pod["containers"][0]
    command = container["command"][2]
    assert job["completionMode"] == "Indexed"
    assert f"--nnodes {job['completions']} " in command
    assert job["parallelism"] == job["completions"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": "flambeau"}
    assert pod["subdomain"] == name
    assert f"--rdzv flambeau-0.{name}:{service['spec']['ports'][0]['port']} " in command
    assert command.splitlines()[1].startswith("exec ")  # signals are for process 1
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        v["name"] for v in pod["volumes"]
    }


def test_kubernetes_knows_the_exit_codes() -> None:
    _, job = kubernetes()
    rules = {
        rule["onExitCodes"]["values"][0]: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {2: "FailJob", 75: "Ignore"}
    names = {
        r["onExitCodes"]["containerName"]
        for r in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in r
    }
    assert names == {job["template"]["spec"]["containers"][0]["name"]}
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy asks for it


# The schemas of 1.26 to 1.28 ask for onPodConditions in every rule, which clusters of them do not.
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_takes_the_job_without_volumes(version: str) -> None:
    [job] = yaml.safe_load_all((JOBS / "kubernetes_bucket.yaml").read_text())
    assert kubernetes_validate.validate(job, version, strict=True) == version
    assert job["spec"]["podFailurePolicy"] == kubernetes()[1]["podFailurePolicy"]
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    program, *words = container["command"]
    assert program == "flambeau"
    check(words)
    scratch, memory = container["volumeMounts"]
    folders = [word.partition("=")[2] for word in words if word.startswith(("--out", "--cache="))]
    assert len(folders) == 2 and all(one.startswith(scratch["mountPath"]) for one in folders)
    assert memory["mountPath"] == "/dev/shm"
    assert {scratch["name"], memory["name"]} == {one["name"] for one in pod["volumes"]}


def test_skypilot_runs_its_command_on_each_node(cluster: dict[str, str], tmp_path: Path) -> None:
    task = yaml.safe_load((JOBS / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    text = task["run"].replace(":29500", f":{free_port()}")
    (tmp_path / "finish").touch()
    nodes = [
        subprocess.Popen(
            ["bash", "-c", text],
            cwd=tmp_path,
            env={
                **cluster,
                "SKYPILOT_NODE_IPS": "localhost\n127.0.0.2",
                "SKYPILOT_NUM_NODES": f"{task['num_nodes']}",
                "SKYPILOT_NODE_RANK": f"{number}",
            },
        )
        for number in range(task["num_nodes"])
    ]
    assert [node.wait(60) for node in nodes] == [0, 0]
    [[ranks], again] = notes(tmp_path)
    assert again == [ranks]
    world, words = ranks.split(" ", 1)
    assert world == "2"
    check(["train", *ast.literal_eval(words)])


def test_a_rank_of_ray_continues_from_the_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its function, called as Ray calls it, where an earlier machine has left only the bucket."""
    for name in ("ray", "ray.train", "ray.train.torch"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    draw = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 255, (20, 20, 3), np.uint8)).save(path)
    pack(tmp_path / "photos", tmp_path / "photos.tar", Conversion(), Split(shards=2), workers=1)
    (tmp_path / "bucket" / "photos").mkdir(parents=True)
    for path in tmp_path.glob("photos*.*"):
        path.rename(tmp_path / "bucket" / "photos" / path.name)
    monkeypatch.setenv("BUCKET", f"file://{tmp_path}/bucket")
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/cache")
    settings = {
        "model": "tiny_convnet",
        "image_size": 32,
        "batch_size": 4,
        "epochs": 2,
        "device": "cpu",
    }
    train_rank = load_script(JOBS / "ray_train.py").train_rank
    first, second = tmp_path / "first", tmp_path / "second"
    for machine in (first, second):
        machine.mkdir()
        monkeypatch.chdir(machine)
        train_rank(settings)
    weights = [(one / "run" / "model.safetensors").read_bytes() for one in (first, second)]
    assert weights[0] == weights[1]
    lines = [(one / "run" / "metrics.jsonl").read_bytes() for one in (first, second)]
    assert lines[0] == lines[1]  # with the times that the first one took


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_takes_the_file(version: str) -> None:
    documents = list(yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text()))
    for document in documents:
        assert kubernetes_validate.validate(document, version, strict=True) == version
    rules = documents[1]["spec"]["podFailurePolicy"]["rules"]
    assert all(rule["action"] in ("FailJob", "Ignore") and len(rule) == 2 for rule in rules)
    rules[-1]["onPodConditions"][0]["status"] = True  # as YAML reads it without quotation marks
    with pytest.raises(kubernetes_validate.ValidationError, match="not of type 'string'"):
        kubernetes_validate.validate(documents[1], version, strict=True)
