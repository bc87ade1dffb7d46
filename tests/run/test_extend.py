"""A finished run that is trained on: the schedule is that of the whole length, and stops cost nothing."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from flambeau.errors import InputError
from flambeau.recipes.training.schedules import cosine
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.folder.summary import summarize
from flambeau.run.run import Run


class Stop(Exception):
    """Stands for a kill."""


def start(folder: Path, **options: Any) -> Run:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    told = {"duration": "2ep", "batch_size": 4, "schedule": "cosine", "log_every": 3, "bar": False}
    return Run(
        folder, model, optimizer, TensorDataset(x, (x[:, 0] > 0).long()), **{**told, **options}
    )


def train(run: Run, *, stop_at: int = -1, early_at: int = -1) -> Run:
    for _ in run.epochs():
        for x, y in run.batches():
            if run.state.step == stop_at:
                raise Stop
            run.step(cross_entropy(run.model(x), y))
        for x, y in run.evaluate(run_data(run)):
            run.log(val_accuracy=run.model(x).argmax(1) == y)
        if run.state.step == early_at:
            run.stop()
    return run


def run_data(run: Run) -> TensorDataset:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))
    return TensorDataset(x, (x[:, 0] > 0).long())


def lines(folder: Path) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k not in ("images_per_s", "data_wait")} for line in every
    ]


def test_a_finished_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(start(tmp_path / "run"))
    before = lines(tmp_path / "run")
    run = start(tmp_path / "run", extend="1ep")
    assert run.result is None
    assert (
        "the run of 12 steps is extended by 1ep: from step 12 to 18, 1 epoch; the learning rate is that of a "
        "run of 18 steps, so now " in (capsys.readouterr().err)
    )
    train(run)
    assert run.result is not None
    after = lines(tmp_path / "run")
    assert after[: len(before)] == before
    assert [line["step"] for line in after[len(before) :]] == [15, 18, 18]
    rate = 0.1 * cosine(14, total_steps=18)
    assert after[len(before)]["learning_rate"] == pytest.approx(rate)
    assert (summarize(tmp_path / "run", name="run").step, run.plan.total_steps) == (18, 18)

    # Once it is done, the same call does not train again; more of it does, and less is refused.
    assert list(start(tmp_path / "run", extend="1ep").epochs()) == []
    with pytest.raises(InputError, match="has been extended by 1ep: give extend = '1ep', or more"):
        start(tmp_path / "run")
    assert train(start(tmp_path / "run", extend="7st")).state.step == 19
    assert summarize(tmp_path / "run", name="run").state == "finished"


def test_an_extension_that_is_killed_has_the_same_bits(tmp_path: Path) -> None:
    for name in ("whole", "stopped"):
        train(start(tmp_path / name))
    train(start(tmp_path / "whole", extend="2ep"))
    with pytest.raises(Stop):
        train(start(tmp_path / "stopped", extend="2ep", checkpoint_every="2st"), stop_at=15)
    assert summarize(tmp_path / "stopped", name="").state == "stopped"
    for less in (None, "1ep"):
        with pytest.raises(
            InputError, match="by 2ep, of which it has trained 14 of 24 steps: give"
        ):
            start(tmp_path / "stopped", extend=less)
    with pytest.raises(InputError, match="stands at step 14 of 24: let it finish first"):
        start(tmp_path / "stopped", extend="3ep")
    train(start(tmp_path / "stopped", extend="2ep"))
    assert lines(tmp_path / "stopped") == lines(tmp_path / "whole")
    weights = [
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")
    ]
    assert weights[0] == weights[1]


def test_an_extension_keeps_the_best_of_an_evaluation_that_was_made_again(tmp_path: Path) -> None:
    """Asked to stop in the last evaluation, a run has a checkpoint from before it, which a resume repeats."""

    def go(folder: Path, *, asks_at: int = -1, **options: Any) -> Run:
        run = start(folder, keep=1, **options)
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(cross_entropy(run.model(x), y))
            for _ in run.evaluate(run_data(run)):
                run.log(val_accuracy=1 / (1 + abs(run.state.step - 12)))
                if run.state.step == asks_at:
                    os.kill(os.getpid(), signal.SIGTERM)
        return run

    go(tmp_path / "whole")
    with pytest.raises(SystemExit):
        go(tmp_path / "stopped", asks_at=12)
    go(tmp_path / "stopped")
    for name in ("whole", "stopped"):
        result = go(tmp_path / name, extend="2ep").result
        assert result is not None
        assert (result.weights, result.step) == ("best", 12)
    assert lines(tmp_path / "stopped") == lines(tmp_path / "whole")


def test_an_extension_without_a_step_is_taken_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run", "whole"):
        train(start(tmp_path / name))
        train(start(tmp_path / name, extend="1ep"))
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    for mistyped in ("300ep", "200ep"):  # the second one is shorter
        with pytest.raises(Stop):  # killed before the first checkpoint
            train(start(tmp_path / "run", extend=mistyped), stop_at=20)
    capsys.readouterr()
    run = train(start(tmp_path / "run", extend="1ep"))
    assert "is not extended by 200ep: none of that was trained" in capsys.readouterr().err
    assert run.result is not None
    assert (run.state.step, run.result.step) == (18, 18)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    for name in ("run", "whole"):
        train(start(tmp_path / name, extend="2ep"))
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def test_killed_between_result_and_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(start(tmp_path / "run"))
    with monkeypatch.context() as patch:
        patch.setattr(
            "flambeau.run.folder.run_folder.RunFolder.update_config",
            lambda self: (_ for _ in ()).throw(Stop),
        )
        with pytest.raises(Stop):
            start(tmp_path / "run", extend="1ep")
    assert not (tmp_path / "run" / "result.json").exists()
    run = train(start(tmp_path / "run", extend="1ep"))
    assert run.state.step == 18
    assert run.result is not None


def test_a_run_that_was_ended_early_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(start(tmp_path / "run", duration="5ep"), early_at=12)
    assert run.state.step == 12
    with pytest.raises(
        Stop
    ):  # before a checkpoint of the extension: the one that is there is of an end
        train(start(tmp_path / "run", duration="5ep", extend="1ep"), stop_at=15)
    run = start(tmp_path / "run", duration="5ep", extend="1ep")
    assert (
        "the run of 30 steps, which ended at step 12, is extended by 1ep: from step 12 to 36, 4 epochs; "
        in capsys.readouterr().err
    )
    assert run.epochs_since_best == 0
    assert train(run).state.step == 36


def test_a_rollback_to_the_end_of_the_first_part(tmp_path: Path) -> None:
    train(start(tmp_path / "run", duration="5ep", log_every=1), early_at=12)
    run = start(tmp_path / "run", duration="5ep", extend="1ep", on_nan="rollback", log_every=1)
    for _ in run.epochs():
        for x, y in run.batches():
            bad = run.state.step == 14 and not run.state.rollbacks
            run.step(cross_entropy(run.model(x), y) * (float("nan") if bad else 1.0))
    assert (run.state.step, run.state.rollbacks) == (36, 1)


def test_the_best_of_the_first_part_stays(tmp_path: Path) -> None:
    first = train(start(tmp_path / "run", best="val_accuracy"))
    assert first.result is not None
    step, best = first.result.step, first.result.metrics["val_accuracy"]
    second = start(tmp_path / "run", extend="1ep")
    second.state.lr_scale = 0.0  # learns nothing more
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()
    train(second)
    assert second.result is not None
    assert (second.result.step, second.result.metrics["val_accuracy"]) == (step, best)


def test_what_cannot_be_extended(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="extend = '1ep' is for a finished run, and there is none"):
        start(tmp_path / "new", extend="1ep")
    assert not (tmp_path / "new").exists()
    with pytest.raises(Stop):
        train(start(tmp_path / "run", checkpoint_every="2st"), stop_at=5)
    with pytest.raises(InputError, match="stands at step 4 of 12: let it finish first"):
        start(tmp_path / "run", extend="1ep")
    train(start(tmp_path / "run"))
    with pytest.raises(InputError, match="extend must be a duration such as"):
        start(tmp_path / "run", extend="5%")


def test_the_command(
    flambeau: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"--out {tmp_path / 'run'} --batch-size 4 --precision fp32 --duration 1ep"
    answer = flambeau("train", images, run, "--extend 1ep")
    assert (answer.code, "is for a finished run" in answer.err) == (2, True)
    assert flambeau("train", images, run).code == 0
    assert "this run is finished" in flambeau("train", images, run).out
    answer = flambeau("train", images, run, "--extend 2ep --dry-run")
    assert (answer.code, "the run has 12 steps of 4 per epoch" in answer.err) == (0, True)
    answer = flambeau("train", images, run, "--extend 1ep")
    assert "the run of 4 steps is extended by 1ep" in answer.err
    assert "finished: " in answer.out
    assert "this run is finished" in flambeau("train", images, run, "--extend 1ep").out
    assert "this run is finished" in flambeau("train", images, "--out", tmp_path / "run").out
    assert flambeau("verify", tmp_path / "run").code == 0
    answer = flambeau("train", images, run, "--extend 3ep --fresh")
    assert (answer.code, "is for a finished run" in answer.err) == (2, True)
    assert not (tmp_path / "run.old-1").exists()
    answer = flambeau("train", images, run, "--extend 0ep")
    assert (
        answer.code,
        "has been extended by 1ep: give extend = '1ep', or more" in answer.err,
    ) == (2, True)
    killed = "flambeau.run.folder.run_folder.RunFolder.update_config"
    with monkeypatch.context() as patch:
        write = RunFolder.update_config
        patch.setattr(killed, lambda self: (write(self), (_ for _ in ()).throw(Stop)))
        with pytest.raises(Stop):
            flambeau("train", images, run, "--extend 300ep")
    answer = flambeau("train", images, run, "--extend 1ep")
    assert (answer.code, "not extended by 300ep: none of that" in answer.err) == (0, True)
    again = flambeau("train", images, run, "--extend 1ep").out
    assert "this run is finished" in again
    assert "--extend 10ep trains it on,\n--weights" in again
    answer = flambeau("train", images, run.replace("--duration 1ep", "--duration 5ep"))
    assert "(duration: '1ep' there, '5ep' now)" in answer.err
    assert "continue it (--extend 10ep trains a finished run on for so much more), or" in answer.err
    answer = flambeau("train", images, run, "--seed 4")
    assert "--extend" not in answer.err
    assert "--weights RUN --out NEW begins another one from its weights" in answer.err
    (images / "train" / "a" / "more.png").write_bytes(
        (images / "train" / "a" / "00.png").read_bytes()
    )
    answer = flambeau("train", images, run)
    assert "16 images then, 17 now" in answer.err
    assert "begin with what this one has learned: --weights RUN --out NEW" in answer.err
    new = f"--weights {tmp_path / 'run'} --out {tmp_path / 'new'} --batch-size 5 --duration 1st"
    assert flambeau("train", images, new).code == 0
