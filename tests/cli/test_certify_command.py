"""`flambeau certify` and `verify --replay`: what they show of honest, edited and foreign runs."""

import hashlib
import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flambeau import Run
from flambeau.compare import interval_replay
from flambeau.compare.audit import chance_to_see
from flambeau.recipes.checkpoints.atomic_checkpoint import read_checkpoint, save_checkpoint
from shared_fixtures import write_images

WORDS = (
    "--duration 8st --batch-size 4 --checkpoint-every 2st --keep 9 --log-every 1 --device cpu "
    "--precision fp32 --model tiny_convnet --warmup 0st --image-size 8 --seed 3"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, kept_process: Any) -> Path:
    from flambeau.cli.command import main

    root = tmp_path_factory.mktemp("trained")
    write_images(root / "images")
    with kept_process():
        words = ["train", str(root / "images"), "--out", str(root / "run"), *WORDS.split()]
        assert main(words) == 0
    return root


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, to be changed; the data are where they were."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained / "run", tmp_path / "run")


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_certificate_is_the_same_twice_and_names_no_place(
    flambeau: Any, run: Path, trained: Path
) -> None:
    before = content_of(run)
    assert flambeau("certify run --out a.json").code == 0
    told = json.loads(flambeau("certify", trained / "run", "--out b.json --json").out)
    assert told["sha256"] == hashlib.sha256(Path("b.json").read_bytes()).hexdigest()
    content = Path("a.json").read_bytes()
    assert content == Path("b.json").read_bytes()
    assert str(trained).encode() not in content
    assert content_of(run) == before
    statement = json.loads(content)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicate"]["settings"]["data"] == "images"
    names = [subject["name"] for subject in statement["subject"]]
    assert names[0] == "model.safetensors"
    assert "checkpoints/step-00000008/training_state.pt" in names
    assert statement["predicate"]["data"]["images"]["train"]["images"] > 0
    answer = flambeau("verify run --certificate a.json")
    assert answer.code == 0
    assert "the same hashes" in answer.out


def test_all_intervals_of_an_honest_run_are_equal(flambeau: Any, run: Path) -> None:
    before = content_of(run)
    answer = flambeau("verify run --replay 99 --json")
    assert answer.code == 0, answer
    (told,) = (json.loads(answer.out),)
    assert [(one["start"], one["end"]) for one in told["replayed"]] == [
        (0, 2), (2, 4), (4, 6), (6, 8),
    ]  # fmt: skip
    assert all(one["equal"] for one in told["replayed"])
    assert told["seen"]["1"] == 1.0
    assert content_of(run) == before


def test_the_seed_chooses(flambeau: Any, run: Path) -> None:
    chosen = []
    for _ in range(2):
        told = json.loads(flambeau("verify run --replay 1 --seed 5 --json").out)
        chosen.append([(one["start"], one["end"]) for one in told["replayed"]])
        assert told["seen"] == {"1": 0.25, "2": 0.5}
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 1


def test_an_edited_setting_and_an_edited_image_are_seen(
    flambeau: Any, run: Path, trained: Path, tmp_path: Path
) -> None:
    assert flambeau("certify run --out a.json").code == 0
    shutil.copytree(trained / "images", tmp_path / "copy")
    path = next((tmp_path / "copy").rglob("*.png"))
    answer = flambeau("verify run --certificate a.json --data copy")
    assert answer.code == 0, answer
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    answer = flambeau("verify run --certificate a.json --data copy")
    assert answer.code == 1
    assert "NOT what the certificate says: data.images" in answer.out
    config = run / "config.toml"
    config.write_text(config.read_text().replace("label_smoothing = 0.1", "label_smoothing = 0.2"))
    answer = flambeau("verify run --certificate a.json --replay 1 --seed 1")
    assert answer.code == 1
    assert "NOT what the certificate says: settings.label_smoothing" in answer.out
    assert "DIFFERS" in answer.out
    assert "the run is NOT what its data, settings and seed give" in answer.out


def test_a_run_in_parts_is_trained_again(
    flambeau: Any, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one process, whatever the number that has trained it."""
    monkeypatch.chdir(tmp_path)
    words = WORDS.replace("8st", "6st")
    assert flambeau("train", trained / "images", "--out one --parts 2", words).code == 0
    answer = flambeau("verify one --replay 9")
    assert answer.code == 0, answer
    assert "shown: 3 of 3 intervals" in answer.out


def test_an_interval_that_cannot_be_trained_is_no_forgery(
    flambeau: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(training: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(interval_replay, "fit", fails)
    answer = flambeau("verify run --replay 1 --seed 1")
    assert answer.code == 1
    assert "could not be trained again: no memory" in answer.out
    assert "NOT shown: steps 2 to 4 (1 of 4 intervals" in answer.out
    assert "NOT what" not in answer.out


def test_ctrl_c_ends_a_replay_as_any_command(
    flambeau: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 75 would say that something was saved, and that the same command goes on from there."""
    trained: list[int] = []

    def interrupted(training: Any) -> None:
        trained.append(1)
        signal.raise_signal(signal.SIGINT)
        real(training)

    real = interval_replay.fit
    monkeypatch.setattr(interval_replay, "fit", interrupted)
    before = content_of(run)
    answer = flambeau("verify run --replay 2")
    assert (answer.code, trained) == (130, [1])
    assert "a checkpoint" not in answer.err
    assert content_of(run) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_machine_is_said_before_anything_is_trained(flambeau: Any, run: Path) -> None:
    folder = run / "checkpoints" / "step-00000004"
    old = read_checkpoint(folder)
    exactness = {**old.meta["exactness"], "cpu_kernels": "SSE"}
    shutil.rmtree(folder)
    save_checkpoint(folder, old.files, meta={**old.meta, "exactness": exactness})
    answer = flambeau("verify run --replay 2")
    assert answer.code == 1
    assert "NOT shown: this machine does not give the same bits" in answer.out
    assert "cpu_kernels SSE then" in answer.out
    assert "again" not in answer.err


def test_published_weights_of_another_step(flambeau: Any, run: Path) -> None:
    weights = run / "checkpoints" / "step-00000002" / "model.safetensors"
    shutil.copy(weights, run / "model.safetensors")
    answer = flambeau("verify run --replay 1")
    assert answer.code == 1
    assert "FORGED or damaged: model.safetensors is not" in answer.out
    assert flambeau("certify run --out a.json").code == 2


def test_published_weights_that_nothing_shows(flambeau: Any, run: Path) -> None:
    """They are what a user takes: equal intervals of other checkpoints say nothing of them."""
    result = run / "result.json"
    written = result.read_bytes()
    shutil.rmtree(run / "checkpoints" / f"step-{json.loads(written)['step']:08d}")
    answer = flambeau("verify run --replay 1")
    assert answer.code == 1
    assert "NOT shown: where the weights of model.safetensors are from" in answer.out
    result.unlink()
    answer = flambeau("verify run --replay 1")
    assert answer.code == 1
    assert "where model.safetensors is from (result.json is missing)" in answer.out


def test_a_checkpoint_under_the_name_of_another(flambeau: Any, run: Path) -> None:
    assert flambeau("certify run --out a.json").code == 0
    there, other = (run / "checkpoints" / f"step-{step:08d}" for step in (4, 2))
    shutil.rmtree(there)
    shutil.copytree(other, there)
    wrong = "manifest.json is of step 2: the folder was renamed"
    for words in ("verify run", "verify run --replay 1", "verify run --certificate a.json"):
        answer = flambeau(words)
        assert answer.code == 1
        assert wrong in answer.out
    assert wrong in flambeau("certify run --out b.json").err


def test_differences_of_a_certificate_are_few_lines_with_values(flambeau: Any, run: Path) -> None:
    assert flambeau("certify run --out a.json").code == 0
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    config = run / "config.toml"
    config.write_text(config.read_text().replace("label_smoothing = 0.1", "label_smoothing = 0.2"))
    lines = flambeau("verify run --certificate a.json").out.splitlines()
    prefix = "NOT what the certificate says: "
    told = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    assert told[0] == "checkpoints step-00000004 is missing now"
    assert "settings.label_smoothing is 0.2, and 0.1 in the certificate" in told
    assert [line for line in told if "step-00000004" in line][1:] == [
        f"subject checkpoints/step-00000004/{name} is missing now"
        for name in ("manifest.json", "model.safetensors", "training_state.pt")
    ]


def test_as_many_images_with_another_name(flambeau: Any, run: Path, trained: Path) -> None:
    shutil.copytree(trained / "images", "copy")
    path = next(Path("copy").rglob("*.png"))
    path.rename(path.with_name("zz.png"))
    answer = flambeau("verify run --replay 1 --data copy")
    assert answer.code == 1
    assert "images as then, with other names, sizes or labels)" in answer.out


def test_data_that_are_elsewhere(flambeau: Any, run: Path, trained: Path) -> None:
    config = run / "config.toml"
    there = f"{trained / 'images'}"
    config.write_text(config.read_text().replace(there, f"{there}-of-another-machine"))
    for words in ("verify run --replay 1", "certify run --out a.json"):
        answer = flambeau(words)
        assert answer.code == 2
        assert "images-of-another-machine, from where the run has read its images" in answer.err
        assert "with --data" in answer.err


def test_a_run_of_a_script_has_hashes_only(flambeau: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    data = TensorDataset(torch.randn(8, 2), torch.zeros(8, dtype=torch.int64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    secret = {"token": "hunter2"}
    mine = Run(
        "mine", model, optimizer, data, duration="2st", batch_size=4, bar=False, config=secret
    )
    for _ in mine.epochs():
        for x, y in mine.batches():
            mine.step(nn.functional.cross_entropy(model(x), y))
    answer = flambeau("certify mine")
    assert answer.code == 0
    assert "hashes only, no replay" in answer.out
    assert "hunter2" not in Path("mine/certificate.json").read_text()
    assert flambeau("verify mine --certificate mine/certificate.json").code == 0
    answer = flambeau("verify mine --replay 1")
    assert answer.code == 2
    assert "it cannot be replayed" in answer.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("verify run --replay 0", "--replay must be at least 1"),
        ("verify run --seed 1", "--seed is for --replay N or --certificate FILE"),
        ("verify run --trust", "--trust is for --replay N or --certificate FILE"),
        ("certify s3://bucket/run", "name a file here with --out"),
        ("verify run --replay 1 --deep", "--deep is for packed images"),
        ("verify run --certificate none.json", "none.json does not exist"),
        ("verify run --certificate run/result.json", "is no certificate of a run"),
        ("verify run --replay 1 --data none", "none does not exist"),
        ("certify run --out run/result.json", "exists and is no certificate"),
        ("certify none", "none does not exist"),
    ],
)
def test_wrong_input_is_one_error(flambeau: Any, run: Path, words: str, said: str) -> None:
    answer = flambeau(words)
    assert answer.code == 2
    assert said in answer.err


def test_chance_to_see_is_the_hypergeometric_one() -> None:
    assert chance_to_see(10, 1, 3) == pytest.approx(0.3)
    assert chance_to_see(6, 2, 3) == pytest.approx(1 - (4 / 6) * (3 / 5) * (2 / 4))
    assert math.isclose(chance_to_see(4, 4, 1), 1)


def test_a_certificate_of_another_state_is_not_replaced(flambeau: Any, run: Path) -> None:
    """It may be signed; the same bytes may be written again."""
    assert flambeau("certify run").code == 0
    written = Path("run/certificate.json").read_bytes()
    assert flambeau("certify run").code == 0
    shutil.rmtree(max((run / "checkpoints").glob("step-*[!8]")))
    refused = flambeau("certify run")
    assert refused.code == 2 and "is the certificate of another state of the run" in refused.err
    assert Path("run/certificate.json").read_bytes() == written
    assert flambeau("certify run --out new.json").code == 0


def test_a_replay_keeps_data_of_a_store_where_this_user_does(
    flambeau: Any, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of another names a folder for its cache: nothing is written there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    assert flambeau("pack", trained / "images", "store/a.tar").code == 0
    words = WORDS.replace("8st", "4st")
    address = f"file://{tmp_path}/store/a.tar"
    assert flambeau("train", address, "--out run --cache theirs", words).code == 0
    shutil.rmtree("theirs")
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/own")
    assert flambeau("verify run --replay 1").code == 0
    assert Path("own").is_dir() and not Path("theirs").exists()
