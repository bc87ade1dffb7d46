"""The job files of docs/jobs: run here, with what a cluster has replaced by a few lines of shell."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml  # timm brings it

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
def test_kubernetes_takes_the_file(version: str) -> None:
    documents = list(yaml.safe_load_all((JOBS / "kubernetes.yaml").read_text()))
    for document in documents:
        assert kubernetes_validate.validate(document, version, strict=True) == version
    rules = documents[1]["spec"]["podFailurePolicy"]["rules"]
    assert all(rule["action"] in ("FailJob", "Ignore") and len(rule) == 2 for rule in rules)
    rules[-1]["onPodConditions"][0]["status"] = True  # as YAML reads it without quotation marks
    with pytest.raises(kubernetes_validate.ValidationError, match="not of type 'string'"):
        kubernetes_validate.validate(documents[1], version, strict=True)
