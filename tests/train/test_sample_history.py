"""What a training notes of its samples: right, the same after a resume, and good to find wrong labels by."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.data.sources.open_data import open_sources
from flambeau.train.build.auto_settings import resolve
from flambeau.train.evaluation.sample_history import FILE, SampleHistory, label_suspects
from flambeau.train.fit_classifier import fit, set_up
from flambeau.train.loop.resumable_state import ResumableState
from flambeau.train.settings.config_file import canonical
from flambeau.train.settings.settings import Settings

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
        data=str(data), device="cpu", precision="fp32", batch_size=10, checkpoint_every="1st", keep=99,
        **({"epochs": 6} | given),
    ))  # fmt: skip
    resolved, facts = resolve(settings, *sources)
    training = set_up(resolved, facts, *sources, folder=folder, bar=False)
    if stop_at >= 0:
        loss_of = training.loss_of.with_logits

        def dies(*batch: Any, step: int) -> Any:
            if step == stop_at:
                raise KeyboardInterrupt
            return loss_of(*batch, step=step)

        training.loss_of.with_logits = dies  # type: ignore[method-assign]
    fit(training)
    return training


def micro(indices: list[int], bad: tuple[int, ...] = ()) -> MicroBatch:
    return MicroBatch(
        None, np.array(indices), len(indices) - len(bad), 4, 1, True, True, 4, bad, True, 0
    )


def test_sums_are_those_of_the_losses() -> None:
    history = SampleHistory(5, fingerprint="x", device=torch.device("cpu"), is_alone=True)
    logits = torch.randn(4, 3, requires_grad=True)
    targets = torch.tensor([0, 1, 2, 1])
    history.note(micro([3, 0, 4, 1]), logits, targets)
    history.note(micro([3, 2, 0], bad=(2,)), logits[:2], targets[:2])
    losses = F.cross_entropy(logits, targets, reduction="none").detach()
    state = history.state_dict()
    expected = torch.stack([2 * losses[1], losses[3], 0 * losses[0], 2 * losses[0], losses[2]])
    torch.testing.assert_close(state["sums"], expected)
    assert state["seen"].tolist() == [2, 1, 0, 2, 1]
    best = logits.detach().clone()
    best[range(4), targets] = -torch.inf
    assert state["other"][[3, 0, 4, 1]].tolist() == best.argmax(1).tolist()
    assert not state["sums"].requires_grad


def test_one_of_several_processes_notes_nothing(tmp_path: Path) -> None:
    history = SampleHistory(5, fingerprint="x", device=torch.device("cpu"), is_alone=False)
    history.note(micro([3, 0]), torch.randn(2, 3), torch.tensor([0, 1]))
    history.save(tmp_path)
    assert not history.state_dict()["seen"].any()
    assert list(tmp_path.iterdir()) == []


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
