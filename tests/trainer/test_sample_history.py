"""What a training notes of its samples: right, the same after a resume, and good to find wrong labels by."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.data.sources.open_data import open_sources
from flambeau.recipes.data.sample_order import sample_order
from flambeau.run.loop.state import ResumableState
from flambeau.trainer.evaluation.sample_history import FILE, SampleHistory, label_suspects
from flambeau.trainer.fit import fit, set_up
from flambeau.trainer.parts.auto_settings import resolve
from flambeau.trainer.parts.data import Prepared
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.settings.stored_settings import canonical
from flambeau.trainer.tasks.classification import Classification

NUM = 60


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Bright and dark noise; six labels are wrong."""
    draw = np.random.default_rng(0)
    labels = np.arange(NUM) % 2
    images = draw.integers(0, 150, (NUM, 8, 8)) + 100 * labels[:, None, None]
    wrong = labels.copy()
    wrong[:6] = 1 - wrong[:6]
    np.savez(tmp_path / "a_train.npz", images=images.astype(np.uint8), labels=wrong)
    np.savez(tmp_path / "a_val.npz", images=images[20:40].astype(np.uint8), labels=labels[20:40])
    return tmp_path / "a_train.npz"


def train(data: Path, folder: Path, *, stop_at: int = -1, **given: Any) -> Any:
    sources = open_sources(data)
    settings = canonical(Settings(
        data=str(data), device="cpu", precision="fp32", checkpoint_every="1st", keep=99,
        **({"epochs": 6, "batch_size": 10} | given),
    ))  # fmt: skip
    resolved, facts = resolve(settings, *sources)
    training = set_up(Prepared(resolved, facts, *sources), folder=folder, bar=False)
    if stop_at >= 0:
        loss_of = training.loss_of.with_logits

        def dies(*batch: Any, step: int) -> Any:
            if step == stop_at:
                raise KeyboardInterrupt
            return loss_of(*batch, step=step)

        training.loss_of.with_logits = dies  # type: ignore[method-assign]
    fit(training)
    return training


def new_history(num_samples: int) -> SampleHistory:
    task = Classification(("a", "b", "c"))
    return task.history(num_samples, fingerprint="x", device=torch.device("cpu"))


def micro(indices: list[int], bad: tuple[int, ...] = ()) -> MicroBatch:
    return MicroBatch(
        None, np.array(indices), len(indices) - len(bad), 4, 1, True, True, 4, bad, True, 0
    )


def test_sums_are_those_of_the_losses() -> None:
    history = new_history(5)
    logits = torch.randn(4, 3, requires_grad=True)
    targets = torch.tensor([0, 1, 2, 1])
    history.note(micro([3, 0, 4, 1]), logits, targets, step=0)
    history.note(micro([3, 2, 0], bad=(2,)), logits[:2], targets[:2], step=1)
    losses = F.cross_entropy(logits, targets, reduction="none").detach()
    state = history.state_dict()
    expected = torch.stack([2 * losses[1], losses[3], 0 * losses[0], 2 * losses[0], losses[2]])
    torch.testing.assert_close(
        state["units"].double() / 2**24, expected.double(), rtol=0, atol=1e-7
    )
    assert state["seen"].tolist() == [2, 1, 0, 2, 1]
    best = logits.detach().clone()
    best[range(4), targets] = -torch.inf
    assert (state["newest"][[3, 0, 4, 1]] % 2**20).tolist() == best.argmax(1).tolist()


def test_a_rank_counts_its_own_samples_and_no_stand_ins() -> None:
    history = new_history(5)
    logits, targets = torch.randn(2, 3), torch.tensor([0, 1])
    history.note(micro([3, 0, 1, 2])._replace(local=slice(2, 4)), logits, targets, step=0)
    history.note(micro([3, 0])._replace(local=slice(0, 2), size=0), logits, targets, step=1)
    assert history.state_dict()["seen"].tolist() == [0, 1, 1, 0, 0]


def test_the_class_preferred_last_is_that_of_the_last_step() -> None:
    """Whichever rank has seen it, and though it comes twice in a step."""
    history = new_history(2)
    for step, best in ((1, 2), (2, 1)):
        logits = torch.eye(3)[[best, best]]
        history.note(micro([1, 1]), logits, torch.tensor([0, 0]), step=step)
    assert history.state_dict()["newest"][1] % 2**20 == 1


def test_an_infinite_loss_is_counted_as_a_large_one() -> None:
    history = new_history(2)
    logits = torch.tensor([[torch.inf, 0.0], [0.0, torch.inf]])
    history.note(micro([0, 1]), logits, torch.tensor([1, 1]), step=0)
    units = history.state_dict()["units"]
    assert (units >= 0).all()
    assert (units <= 2**40).all()


def test_wrong_labels_come_first(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path / "run")
    source, _ = open_sources(data)
    suspects = label_suspects(tmp_path / "run", source, most=6)
    assert suspects is not None
    assert {suspect.number for suspect in suspects} == set(range(6))
    assert [s.loss for s in suspects] == sorted((s.loss for s in suspects), reverse=True)
    for suspect in suspects:
        assert suspect.label == source.classes[int(source.labels[suspect.number])]
        assert suspect.suggested != suspect.label
        assert suspect.image == source.describe(suspect.number)
    worse = label_suspects(tmp_path / "run", source)
    assert worse is not None
    assert all(suspect.loss > np.log(2) for suspect in worse)
    with np.load(tmp_path / "run" / FILE) as stored:
        assert stored["seen"].tolist() == [6] * NUM


def test_a_run_that_was_stopped_has_the_same(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(data, tmp_path / "stopped", stop_at=20)
    assert not (tmp_path / "stopped" / FILE).exists()
    train(data, tmp_path / "stopped")
    whole, stopped = (dict(np.load(tmp_path / name / FILE)) for name in ("whole", "stopped"))
    for name in ("loss", "seen", "other", "fingerprint"):
        assert whole[name].tolist() == stopped[name].tolist()


NET = """
from torch import nn
def net(num_classes, channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, num_classes))
"""
RANKS: dict[str, Any] = {"batch_size": 7, "epochs": 2, "lr": 0.05, "flip": False, "padding": 0}


def by_hand(folder: Path, data: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and preferred other class of each sample, from the checkpoint before each step and the order."""
    stored, facts = np.load(data), json.loads((folder / "dataset.json").read_text())
    pixels = torch.from_numpy(stored["images"]).flatten(1).float() / 255
    pixels = (pixels - facts["mean"][0]) / facts["std"][0]
    labels = torch.from_numpy(stored["labels"])
    sums, other = torch.zeros(NUM), torch.full((NUM,), -1)
    orders = [sample_order(NUM, seed=0, epoch=epoch) for epoch in range(2)]
    for step, picked in enumerate(part for order in orders for part in order.split(7)):
        checkpoint = folder / "checkpoints" / f"step-{step:08d}"
        saved = safetensors.torch.load_file(checkpoint / "model.safetensors")
        logits = pixels[picked] @ saved["1.weight"].T + saved["1.bias"]
        sums[picked] += F.cross_entropy(logits, labels[picked], reduction="none")
        other[picked] = 1 - labels[picked]  # of two classes
    return sums / 2, other


def on_ranks(data: Path, folder: Path, stop_at: int, given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    train(data, folder, stop_at=stop_at, **RANKS, **given)


@pytest.mark.parametrize("given", [{}, {"shard": "fsdp"}], ids=["ddp", "fsdp"])
def test_two_processes_note_what_each_sample_cost(
    data: Path, tmp_path: Path, start_ranks: Callable[..., Any], given: dict[str, Any]
) -> None:
    (tmp_path / "net.py").write_text(NET)
    given = {"model": f"{tmp_path}/net.py:net", **given}
    start_ranks(2, on_ranks, data, tmp_path / "run", -1, given).results()
    stored = dict(np.load(tmp_path / "run" / FILE))
    assert stored["seen"].tolist() == [2] * NUM
    by = tmp_path / "run"
    if "shard" in given:  # which leaves pieces: the steps are those of one process
        by = tmp_path / "alone"
        start_ranks(1, on_ranks, data, by, -1, {"model": given["model"]}).results()
    loss, other = by_hand(by, data)
    torch.testing.assert_close(torch.from_numpy(stored["loss"]), loss, rtol=1e-5, atol=1e-5)
    assert stored["other"].tolist() == other.tolist()
    assert label_suspects(tmp_path / "run", open_sources(data)[0]) is not None
    start_ranks(2, on_ranks, data, tmp_path / "killed", 13, given).codes()
    assert not (tmp_path / "killed" / FILE).exists()
    start_ranks(2, on_ranks, data, tmp_path / "killed", -1, given).results()
    assert (tmp_path / "killed" / FILE).read_bytes() == (tmp_path / "run" / FILE).read_bytes()


def test_another_number_of_processes_goes_on_counting(
    data: Path, tmp_path: Path, start_ranks: Callable[..., Any]
) -> None:
    (tmp_path / "net.py").write_text(NET)
    given = {"model": f"{tmp_path}/net.py:net"}
    start_ranks(1, on_ranks, data, tmp_path / "whole", -1, given).results()
    for world, stop_at in ((1, 5), (2, 12), (1, -1)):
        start_ranks(world, on_ranks, data, tmp_path / "run", stop_at, given).codes()
    whole, changed = (dict(np.load(tmp_path / name / FILE)) for name in ("whole", "run"))
    assert changed["seen"].tolist() == [2] * NUM
    np.testing.assert_allclose(changed["loss"], whole["loss"], rtol=1e-5, atol=1e-5)
    assert changed["other"].tolist() == whole["other"].tolist()


def test_a_checkpoint_in_other_units_is_continued(data: Path) -> None:
    history = new_history(5)
    history.load_state_dict({name: torch.ones(5) for name in ("sums", "seen", "other")})
    assert not history.state_dict()["seen"].any()


def test_a_checkpoint_without_it_is_continued(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an earlier version wrote it."""
    snapshot = ResumableState.snapshot

    def without(self: ResumableState, **given: Any) -> Any:
        taken = snapshot(self, **given)
        assert taken.state["user"].pop("sample_history")
        return taken

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ResumableState, "snapshot", without)
        train(data, tmp_path / "run", stop_at=12)
    trained = train(data, tmp_path / "run")
    assert trained.run.result is not None
    with np.load(tmp_path / "run" / FILE) as stored:
        assert stored["seen"].sum() == 24 * 10


@pytest.mark.parametrize("given", [{"mixup": 0.2}, {"cutmix": 1.0}])
def test_mixed_images_have_no_label(data: Path, tmp_path: Path, given: dict[str, float]) -> None:
    train(data, tmp_path / "run", epochs=1, **given)
    assert not (tmp_path / "run" / FILE).exists()
    assert label_suspects(tmp_path / "run", open_sources(data)[0]) is None


def test_a_file_that_does_not_fit(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path / "run", epochs=1)
    source, val = open_sources(data)
    assert label_suspects(tmp_path / "run", source) is not None
    assert label_suspects(tmp_path / "run", val) is None
    whole = (tmp_path / "run" / FILE).read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"\x80\x04N."):
        (tmp_path / "run" / FILE).write_bytes(damaged)
        assert label_suspects(tmp_path / "run", source) is None
