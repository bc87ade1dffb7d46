"""`flambeau diff`: two runs to where they part; what their folders hold may be anything."""

import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from flambeau.compare import saved_states
from flambeau.compare.paired_replay import replay
from flambeau.compare.replay_text import replay_verdict
from flambeau.compare.run_comparison import compare_runs
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    read_checkpoint,
    save_checkpoint,
    to_bytes,
)
from flambeau.run.options.toml_file import as_toml

WORDS = (
    "--duration 8st --batch-size 4 --checkpoint-every 2st --keep 9 --log-every 3 --device cpu "
    "--precision fp32 --model tiny_convnet --warmup 0st --image-size 8"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, kept_process: Any) -> Path:
    """images/, images_2/ (the same but for a pixel), and runs: base, again, rate (another one), pixel."""
    from flambeau.cli.command import main

    root = tmp_path_factory.mktemp("trained")
    for folder in ("images", "images_2"):
        noise = np.random.default_rng(0)
        for number, part in enumerate(["train/a", "train/b"] * 8 + ["val/a", "val/b"] * 4):
            path = root / folder / part / f"{number // 2:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = noise.integers(100 * (number % 2), 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(path, compress_level=0)
    path = root / "images_2" / "train" / "b" / "03.png"
    pixels = np.array(Image.open(path))
    pixels[2, 5] ^= 1
    Image.fromarray(pixels).save(path, compress_level=0)
    runs = {
        "base": ["images"], "again": ["images", "--workers", "0", "--keep", "8", "--track", "csv"],
        "rate": ["images", "--lr", "0.02"], "pixel": ["images_2"],
    }  # fmt: skip
    for name, (data, *more) in runs.items():
        with kept_process():
            words = [*WORDS.split(), *(more if "--lr" in more else ["--lr", "0.05", *more])]
            assert main(["train", str(root / data), "--out", str(root / name), *words]) == 0
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the runs, to be changed; the data are where they were."""
    for name in ("base", "again", "rate", "pixel"):
        shutil.copytree(trained / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(flambeau: Any, *words: Any, code: int = 1) -> dict[str, Any]:
    answer = flambeau("diff", *words, "--json")
    assert answer.code == code, answer
    result: dict[str, Any] = json.loads(answer.out)
    return result


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def rewritten(
    checkpoint: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
) -> None:
    """A checkpoint as the run would have written it, had its tensors been others."""
    old = read_checkpoint(checkpoint)
    model = safetensors.torch.load(old.files["model.safetensors"])
    meta = dict(old.meta)
    change(model, meta)
    files = {**old.files, "model.safetensors": safetensors.torch.save(model)}
    shutil.rmtree(checkpoint)
    save_checkpoint(checkpoint, files, meta=meta)


def test_equal_runs(flambeau: Any, root: Path) -> None:
    before = files_of(root)
    code, out, err = flambeau("diff", "base", "again")
    assert (code, err) == (0, "")
    assert "setting, without effect on the numbers: keep (9 and 8); track (none and csv)" in out
    assert "metrics.jsonl: identical for 8 steps" in out
    assert "checkpoints: equal to the bit at steps 0 to 8" in out
    assert "All that both have is equal to the bit" in out
    assert files_of(root) == before
    told = found(flambeau, "base", "again", code=0)
    assert (told["identical"], told["parts_in_steps"]) == (True, None)
    assert told["equal_checkpoints"] == [0, 2, 4, 6, 8]


def test_another_rate(flambeau: Any, root: Path) -> None:
    told = found(flambeau, "base", "rate")
    assert [(d["name"], d["values"]) for d in told["differences"]] == [("lr", [0.05, 0.02])]
    assert told["parts_in_steps"] == [1, 2]
    assert told["equal_checkpoints"] == [0]
    assert told["first_different_checkpoint"]["step"] == 2
    assert told["first_loss_of_a_step"]["step"] == 2
    assert "What differs between them: lr (0.05 and 0.02)" in told["verdict"]
    assert "that of step 1 is equal" in told["verdict"]


def test_one_pixel_is_named_with_its_step(flambeau: Any, root: Path, trained: Path) -> None:
    told = found(flambeau, "base", "pixel")
    path = trained / "images" / "train" / "b" / "03.png"
    assert told["sample"]["text"].startswith(f"1 pixel of {path}, first in row 2, column 5: ")
    low, high = told["parts_in_steps"]
    assert low <= told["sample"]["step"] <= high
    assert f"which is seen first at step {told['sample']['step']}" in told["verdict"]


def test_data_that_have_changed_since(flambeau: Any, root: Path) -> None:
    config = root / "pixel" / "dataset.json"
    facts = json.loads(config.read_text())
    config.write_text(json.dumps(facts | {"train_fingerprint": "0" * 64}))
    told = found(flambeau, "base", "pixel")
    assert "has changed since pixel was trained on it" in told["verdict"]
    facts["train_fingerprint"] = "0" * 64
    source = root / "pixel" / "config.toml"
    source.write_text(source.read_text().replace("images_2", "gone"))
    assert "gone" in found(flambeau, "base", "pixel")["verdict"]


def test_data_of_a_function_are_not_run(flambeau: Any, root: Path) -> None:
    code = root / "harm.py"
    code.write_text("raise SystemExit('run')\n")
    config = root / "pixel" / "config.toml"
    stored = tomllib.loads(config.read_text())
    config.write_bytes(as_toml({**stored, "data": f"{code}:f"}))
    dataset = root / "pixel" / "dataset.json"
    facts = json.loads(dataset.read_text())
    dataset.write_text(json.dumps(facts | {"train_fingerprint": "0" * 64}))
    assert "would have to be run to open it" in found(flambeau, "base", "pixel")["verdict"]


def test_a_bit_in_memory(flambeau: Any, root: Path) -> None:
    def flip(model: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        model["stem.0.weight"].view(torch.int32).view(-1)[5] ^= 1 << 30

    rewritten(root / "again" / "checkpoints" / "step-00000006", flip)
    told = found(flambeau, "base", "again")
    assert told["parts_in_steps"] == [5, 6]
    (tensor,) = told["first_different_checkpoint"]["tensors"]
    assert (tensor["name"], tensor["flipped_bit"]) == ("stem.0.weight", [5, 30])
    assert "the bit has flipped in the memory" in told["verdict"]
    assert "one bit: number 30 of element 5" in flambeau("diff", "base", "again").out


def test_a_bit_on_the_disk(flambeau: Any, root: Path) -> None:
    path = root / "again" / "checkpoints" / "step-00000006" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 16
    path.write_bytes(data)
    told = found(flambeau, "base", "again")
    assert told["equal_checkpoints"] == [0, 2, 4, 8]
    assert f"bit 4 of byte {len(data) - 100} has flipped on the disk" in told["verdict"]
    assert "step-00000006 of again is damaged" in told["verdict"]


def test_a_resume_elsewhere_and_a_rollback(flambeau: Any, root: Path) -> None:
    def moved(model: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        meta["exactness"] = {**meta["exactness"], "threads": 7}
        model["head.weight" if "head.weight" in model else next(iter(model))] += 1e-3

    rewritten(root / "again" / "checkpoints" / "step-00000004", moved)
    told = found(flambeau, "base", "again")
    assert told["parts_in_steps"] == [3, 4]
    assert "resumed with threads (" in told["verdict"]
    assert "and 7 at step 4)" in told["verdict"]


def test_library_and_machine(flambeau: Any, root: Path) -> None:
    path = root / "again" / "environment.json"
    environment = json.loads(path.read_text())
    environment["exactness"]["torch"] = "2.14.0"
    environment["packages"]["numpy"] = "1.0"
    environment["cpu"] = "Another"
    environment["platform"] = "Elsewhere"
    path.write_text(json.dumps(environment))
    told = found(flambeau, "base", "again", code=0)  # the numbers are the same
    names = [(d["name"], d["matters"]) for d in told["differences"] if d["kind"] == "environment"]
    assert names == [("torch", True), ("platform", False), ("cpu", True), ("numpy", True)]
    assert "has shown no effect" in told["verdict"]


def test_the_model_is_told_in_words(flambeau: Any, root: Path) -> None:
    path = root / "again" / "environment.json"
    environment = json.loads(path.read_text())
    environment["model"]["parameters"] += 1
    path.write_text(json.dumps(environment))
    differences = found(flambeau, "base", "again", code=0)["differences"]
    (told,) = [one for one in differences if one["name"] == "model"]
    assert [text.split()[-1] for text in told["values"]] == ["parameters"] * 2
    assert told["values"][0] != told["values"][1]
    del environment["model"]  # a run of an earlier version, of which it is not known
    path.write_text(json.dumps(environment))
    differences = found(flambeau, "base", "again", code=0)["differences"]
    assert "model" not in [one["name"] for one in differences]


def test_what_was_not_compared_has_not_shown_that_it_does_nothing(
    flambeau: Any, root: Path
) -> None:
    shutil.rmtree(root / "rate" / "checkpoints")
    (root / "rate" / "metrics.jsonl").write_text("")
    code, out, _ = flambeau("diff", "base", "rate")
    assert code == 2
    assert "There is nothing to compare" in out
    assert "What differs between them: lr" in out
    assert "no effect: " not in out


def test_an_evaluation_that_differs_is_not_the_training(flambeau: Any, root: Path) -> None:
    path = root / "again" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if "val_loss" in row and row["step"] == 4:
            row["val_loss"] += 1
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    told = found(flambeau, "base", "again")
    assert "what differs is a figure, val_loss at step 4" in told["verdict"]
    assert "(+1): the evaluation, or what is logged" in told["verdict"]


def test_loss_is_a_table_for_a_pull_request(flambeau: Any, root: Path) -> None:
    code, out, _ = flambeau("diff", "--loss", "base", "again")
    assert code == 0
    assert out.startswith("**Identical for 8 steps** (")
    assert "| | base | again | change |" in out
    assert "| same |" in out
    code, out, _ = flambeau("diff", "--loss", "base", "rate")
    assert code == 1
    assert out.startswith("**First difference at step 3**: train\\_loss ")
    shutil.rmtree(root / "rate" / "checkpoints")  # metrics.jsonl is enough
    told = found(flambeau, "--loss", "base", "rate")
    assert told["first_difference"]["step"] == 3


def test_runs_of_a_script(flambeau: Any, root: Path) -> None:
    from torch.utils.data import TensorDataset

    from flambeau import Run

    def train(folder: str, noise: float) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        x = torch.randn(16, 4)
        data = TensorDataset(x, (x[:, 0] > noise).long())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = Run(folder, model, optimizer, data, duration="2ep", batch_size=4, keep=9, bar=False)
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(torch.nn.functional.cross_entropy(model(x), y))

    for folder, noise in (("mine", 0.0), ("equal", 0.0), ("other", 1.0)):
        train(folder, noise)
    assert flambeau("diff", "mine", "equal").code == 0
    assert flambeau("diff", "--loss", "mine", "equal").code == 0
    told = found(flambeau, "mine", "other")
    assert told["parts_in_steps"] == [1, 4]
    assert "the code of a script and its data are not in them" in told["verdict"]
    verdict = found(flambeau, "mine", "other", "--replay")["verdict"]
    assert "There is no replay: mine is of a script with its own Run" in verdict
    assert flambeau("diff", "--loss", "mine", "other").code == 1


def test_a_replay_names_the_step_and_what_comes_first_in_it(flambeau: Any, root: Path) -> None:
    before = files_of(root)
    told = found(flambeau, "base", "rate", "--replay")
    assert files_of(root) == before
    replay = told["replay"]
    assert (replay["start"], replay["step"], replay["phase"]) == (0, 1, "update")
    assert replay["reproduced"] == [True, True]
    assert "Options of the optimizer differ there: lr 0.05 and 0.02" in told["verdict"]
    assert "to be expected of lr (0.05 and 0.02)" in told["verdict"]
    assert (
        "Each replay is equal to the bit to the checkpoint of its run (of steps 2 and 2)"
        in (told["verdict"])
    )


def test_runs_in_parts_are_replayed_in_parts(flambeau: Any, root: Path, trained: Path) -> None:
    words = f"{WORDS} --parts 4 --batch-size 8 --duration 2st"
    for name, more in (
        ("one", "--lr 0.05"),
        ("two", "--lr 0.02"),
        ("synced", "--lr 0.05 --sync-bn"),
    ):
        assert flambeau(f"train {trained}/images --out {name} {words} {more}").code == 0
    told = found(flambeau, "one", "two", "--replay")["replay"]
    assert (told["step"], told["phase"], told["reproduced"]) == (1, "update", [True, True])
    _, out, _ = flambeau("diff one synced --replay")
    assert "There is no replay: synced has parts and sync_bn" in out


def test_a_replay_begins_where_both_are_equal(flambeau: Any, root: Path) -> None:
    told = found(flambeau, "base", "pixel")
    step = told["sample"]["step"]
    replay = found(flambeau, "base", "pixel", "--replay")["replay"]
    assert (replay["step"], replay["phase"]) == (step, "pixels")
    assert replay["start"] == told["equal_checkpoints"][-1]
    assert replay["name"].endswith("b/03.png")
    for run in ("base", "pixel"):  # from the beginning, where no checkpoint of both is left
        for folder in (root / run / "checkpoints").iterdir():
            if folder.name != "step-00000008":
                shutil.rmtree(folder)
    code, out, err = flambeau("diff", "base", "pixel", "--replay")
    assert code == 1
    assert (
        f"Replayed from step 0, what differs first is, at step {step}, 1 of 64 pixel values" in out
    )
    assert "equal to the bit to the checkpoint of its run (of steps 8 and 8)" in out
    assert "replaying base from step 0" in err


def test_a_replay_tells_which_run_is_not_what_it_should_be(flambeau: Any, root: Path) -> None:
    def flip(model: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        model["stem.0.weight"].view(torch.int32).view(-1)[5] ^= 1 << 20

    rewritten(root / "again" / "checkpoints" / "step-00000006", flip)
    told = found(flambeau, "base", "again", "--replay")
    assert told["replay"]["reproduced"] == [True, False]
    assert (told["replay"]["start"], told["replay"]["step"]) == (4, None)
    assert "The replay of again is not what the run has recorded" in told["verdict"]
    assert "it has flipped in the memory of that run" in told["verdict"]


def test_what_cannot_be_replayed(flambeau: Any, root: Path, trained: Path) -> None:
    config = root / "rate" / "config.toml"
    text = config.read_text()
    for change, message in (
        (("images", "gone"), "gone"),
        (("tiny_convnet", "no_such_net"), "no_such_net"),
        (("seed = 0", 'seed = 0\nextend = "4st"'), "rate was extended by 4st later"),
        (("flip =", "flop ="), "unknown key 'flop'"),
    ):
        assert change[0] in text
        config.write_text(text.replace(*change))
        code, out, err = flambeau("diff", "base", "rate", "--replay")
        assert code == 1
        assert "There is no replay: " in out
        assert message in out.partition("There is no replay: ")[2]
        assert "Traceback" not in out + err
    same = found(flambeau, "base", "again", "--replay", code=0)
    assert "nothing that both have recorded of their training differs" in same["verdict"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("base", "RUN is missing"),
        ("base again rate", "unexpected argument 'rate'"),
        ("base nowhere", "nowhere does not exist"),
        ("base base/config.toml", "is a file"),
        ("base base/checkpoints", "there is no config.toml in it"),
        ("base base", "are the same folder"),
        ("base again --los", "unknown flag --los; did you mean '--loss'?"),
        ("base ''", "RUN is empty"),
        ("base again --loss --replay", "give one of them"),
    ],
)
def test_wrong_words(flambeau: Any, root: Path, words: str, message: str) -> None:
    code, out, err = flambeau("diff", words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_nothing_in_common(flambeau: Any, root: Path) -> None:
    shutil.rmtree(root / "again" / "checkpoints")
    (root / "again" / "metrics.jsonl").unlink()
    code, out, err = flambeau("diff", "base", "again")
    assert code == 2
    assert "There is nothing to compare" in out
    assert "no step in common" in err
    assert flambeau("diff", "--loss", "base", "again").code == 2


def test_hostile_folders(flambeau: Any, root: Path) -> None:
    """Whatever the folder holds: a sentence, no traceback, and memory is not taken on its word."""
    again = root / "again"

    def check(*codes: int) -> str:
        code, out, err = flambeau("diff", "base", "again")
        assert code in codes, (code, out, err)
        assert "Traceback" not in err
        for words in ("--json", "--loss"):
            assert flambeau("diff", "base", "again", words).code in (0, 1, 2)
        return str(out + err)

    (again / "environment.json").write_text("[" * 100_000)
    (again / "dataset.json").write_text('{"classes": "\x1b[31m", "n": ' + "9" * 4000 + "}")
    assert "\x1b" not in check(1)
    newest = again / "checkpoints" / "step-00000008"
    manifest = newest / "manifest.json"
    for text in (
        "{}",
        "[]",
        '{"files": {"x": {"size": 1e400}}}',
        '{"files": {"../x": {}}}',
        "\x00",
    ):
        manifest.write_text(text)
        assert "step-00000008 of again is damaged" in check(1)
    manifest.unlink()
    os.mkfifo(manifest)
    assert "step-00000008 of again is damaged" in check(1)
    shutil.rmtree(newest)
    shutil.copytree(root / "base" / "checkpoints" / "step-00000008", newest)
    (newest / "model.safetensors").unlink()
    (newest / "model.safetensors").symlink_to("/dev/zero")  # it has no end
    assert "step-00000008 of again is damaged" in check(1)
    shutil.rmtree(newest)
    newest.symlink_to(newest)
    assert "step-00000008 of again is damaged" in check(1)
    (again / "checkpoints" / ("step-" + "9" * 200)).mkdir()
    (again / "metrics.jsonl").unlink()
    (again / "metrics.jsonl").symlink_to("/dev/zero")
    assert "is not a file" in check(2)
    (again / "config.toml").write_text("duration = [" * 1000)
    check(2)


def test_a_hostile_state_is_not_replayed(flambeau: Any, root: Path) -> None:
    checkpoint = root / "rate" / "checkpoints" / "step-00000002"
    files = dict(read_checkpoint(checkpoint).files)
    for state in (
        {"step": "2", "optimizer": {"state": {}, "param_groups": []}},
        {"step": 2, "lr_scale": "x", "optimizer": {"state": {}, "param_groups": []}},
    ):
        shutil.rmtree(checkpoint)
        save_checkpoint(checkpoint, {**files, "training_state.pt": to_bytes(state)}, meta={})
        code, out, err = flambeau("diff", "base", "rate", "--replay")
        assert code == 1
        assert "step-00000002 is damaged: training_state.pt is not of step 2" in out
    for run in ("base", "rate"):  # equal, and not what could be put back
        for folder in (root / run / "checkpoints").iterdir():
            if folder.name == "step-00000002":
                shutil.rmtree(folder)
                save_checkpoint(folder, {**files, "training_state.pt": to_bytes(state)}, meta={})
    code, out, err = flambeau("diff", "base", "rate", "--replay")
    assert code == 1
    assert "There is no replay: " in out
    assert "cannot be put into its model: KeyError" in out
    assert "Traceback" not in out + err


def test_a_checkpoint_that_a_run_removes_meanwhile(
    flambeau: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = saved_states.read_state

    def removed(folder: Path) -> Any:
        if folder == Path("again/checkpoints/step-00000002"):
            shutil.rmtree(folder)
        return own(folder)

    monkeypatch.setattr(saved_states, "read_state", removed)
    told = found(flambeau, "base", "again", code=0)
    assert told["equal_checkpoints"] == [0, 4, 6, 8]
    assert told["damaged_checkpoints"] == []


def test_a_replay_that_is_out_of_time_says_so(root: Path) -> None:
    comparison = compare_runs(Path("base"), Path("rate"))
    result = replay(comparison, say=lambda text: None, seconds=-1)
    assert (result.is_out_of_time, result.last, result.difference) == (True, 0, None)
    said = replay_verdict(comparison, result)
    assert "both are equal to the bit up to step 0 (out of time)" in said


@pytest.mark.parametrize("kind", ["expanded", "deep", "meta", "list", "no model", "pieces"])
def test_hostile_states(flambeau: Any, root: Path, kind: str) -> None:
    checkpoint = root / "again" / "checkpoints" / "step-00000002"
    files = dict(read_checkpoint(checkpoint).files)
    state: dict[str, Any] = {"optimizer": {"state": {0: {}}, "param_groups": []}}
    if kind == "expanded":
        state["optimizer"]["state"][0]["m"] = torch.zeros(1).expand(2**40)
    elif kind == "deep":
        inner: Any = 1
        for _ in range(60):
            inner = [inner]
        state["user"] = inner
    elif kind == "meta":
        state["optimizer"] = 5
    elif kind == "list":
        state["optimizer"]["state"] = [1, 2]
    elif kind == "pieces":
        entry = {"dtype": "float32", "shape": [2**40], "pieces": []}
        index = {"format": 1, "tensors": {"model/w": entry}}
        files = {"sharding.json": json.dumps(index).encode()}
    else:
        files.pop("model.safetensors")
    shutil.rmtree(checkpoint)
    save_checkpoint(checkpoint, {**files, "training_state.pt": to_bytes(state)}, meta={})
    code, out, err = flambeau("diff", "base", "again")
    assert code == 1, (out, err)
    assert "step-00000002 of again is damaged: " in out
    assert "Traceback" not in err
