import warnings

import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flambeau.recipes.training.confusion_matrix import ConfusionMatrix

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "bincount", "masked_select"}


class Recorder(TorchDispatchMode):
    """The names of all operations; the ones in WAITS read a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def samples(num_samples: int = 60, num_classes: int = 7) -> tuple[Tensor, Tensor]:
    """Of which class 3 has no sample, 5 is never predicted, and the last one neither."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_samples, num_classes, generator=generator)
    logits[:, [5, num_classes - 1]] = -9
    targets = torch.randint(num_classes - 1, (num_samples,), generator=generator)
    return logits, torch.where(targets == 3, 0, targets)


def counted(logits: Tensor, targets: Tensor, **options: int) -> ConfusionMatrix:
    matrix = ConfusionMatrix(logits.shape[1], **options)
    matrix.update(logits, targets)
    return matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_figures_are_those_of_scikit_learn(dtype):
    logits, targets = samples()
    logits = logits.to(dtype)
    predicted, matrix = logits.argmax(1), counted(logits, targets)
    expected = sklearn_metrics.confusion_matrix(targets, predicted, labels=range(7))
    assert matrix.counts.tolist() == expected.tolist()
    found, total = matrix.per_class(), matrix.compute()
    figures = sklearn_metrics.precision_recall_fscore_support(
        targets, predicted, labels=range(7), zero_division=0
    )
    for name, values in zip(("precision", "recall", "f1"), figures, strict=False):
        assert found[name].dtype == torch.float64
        torch.testing.assert_close(found[name].nan_to_num(0), torch.from_numpy(values))
    assert found["support"].tolist() == figures[3].tolist()
    assert found["predicted"].tolist() == predicted.bincount(minlength=7).tolist()
    present = targets.unique().tolist()
    means = sklearn_metrics.precision_recall_fscore_support(
        targets, predicted, labels=present, zero_division=0, average="macro"
    )
    for name, value in zip(("precision", "recall", "f1"), means, strict=False):
        assert float(total[f"macro_{name}"]) == pytest.approx(value, rel=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes without a sample
        balanced = sklearn_metrics.balanced_accuracy_score(targets, predicted)
    assert float(total["macro_recall"]) == pytest.approx(balanced, rel=1e-12)
    assert float(total["accuracy"]) == sklearn_metrics.accuracy_score(targets, predicted)
    iou = sklearn_metrics.jaccard_score(targets, predicted, average="macro")
    assert float(total["mean_iou"]) == pytest.approx(iou, rel=1e-12)


def test_what_is_not_defined_is_nan_and_in_no_mean():
    figures = counted(*samples()).per_class()
    names = ("precision", "recall", "f1", "iou")
    assert [bool(figures[name][3].isnan()) for name in names] == [False, True, False, False]
    assert [float(figures[name][5]) for name in names] == [0, 0, 0, 0]
    assert all(figures[name][6].isnan() for name in names)
    assert all(value.isnan() for value in ConfusionMatrix(2).compute().values())


def test_batches_and_parts_add_up_exactly():
    logits, targets = samples()
    whole, first, second = counted(logits, targets), ConfusionMatrix(7), ConfusionMatrix(7)
    for rows in (slice(0, 20), slice(20, 20), slice(20, 33)):
        first.update(logits[rows], targets[rows])
    second.update(logits[33:].argmax(1), targets[33:])  # classes as well as logits
    state = second.state_dict()
    second.reset()
    assert second.counts.sum() == 0
    first.merge(state)
    assert torch.equal(first.counts, whole.counts)
    second.update(logits, targets)
    second.load_state_dict(state)
    assert second.counts.sum() == 27
    state["cells"].zero_()  # a copy
    assert second.counts.sum() == 27


def test_pixels_and_an_ignored_target():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 4, 5, 6, generator=generator)
    targets = torch.randint(4, (2, 5, 6), generator=generator)
    targets[0, 0] = 255
    matrix = counted(logits, targets, ignore_index=255)
    kept, predicted = targets != 255, logits.argmax(1)
    expected = sklearn_metrics.confusion_matrix(targets[kept], predicted[kept], labels=range(4))
    assert matrix.counts.tolist() == expected.tolist()
    iou = sklearn_metrics.jaccard_score(targets[kept], predicted[kept], average="macro")
    assert float(matrix.compute()["mean_iou"]) == pytest.approx(iou, rel=1e-12)


@pytest.mark.parametrize("bad", [-1, 7, 255])
def test_what_is_no_class_is_told_when_the_counts_are_read(bad):
    matrix = ConfusionMatrix(7)
    matrix.update(torch.tensor([0, 1]), torch.tensor([0, bad]))
    matrix.update(torch.tensor([bad]), torch.tensor([1]))
    for read in (matrix.compute, matrix.per_class, lambda: matrix.counts):
        with pytest.raises(
            ValueError, match=r"2 targets or predicted classes are outside \[0, 7\)"
        ):
            read()


def test_nothing_is_read_on_the_host_and_the_device_follows():
    logits, targets = samples()
    matrix = ConfusionMatrix(7, ignore_index=2)
    with Recorder() as recorder:
        matrix.update(logits, targets)
        matrix.state_dict()
        matrix.reset()
    assert "index_add_" in recorder.names  # it does record
    assert not recorder.names & WAITS
    meta = ConfusionMatrix(7, device="meta")
    meta.update(logits.to("meta"), targets.to("meta"))
    assert meta.state_dict()["cells"].device.type == "meta"
    with torch.inference_mode():
        matrix.update(logits, targets)
    matrix.update(logits, targets)
    assert matrix.counts.sum() == 2 * int((targets != 2).sum())


@pytest.mark.parametrize(
    ("predictions", "targets", "error", "message"),
    [
        (torch.zeros(4, 3), torch.zeros(4).long(), ValueError, r"must be \(N, 7, ...\)"),
        (torch.zeros(4, 7), torch.zeros(3).long(), ValueError, r"got \(4, 7\) and \(3,\)"),
        (torch.zeros(4), torch.zeros(4).long(), ValueError, "must be"),
        (torch.zeros(4).long(), torch.zeros(3).long(), ValueError, "the shape of the targets"),
        (torch.zeros(4, 7), torch.zeros(4), TypeError, "must be int64"),
        (torch.zeros(4).int(), torch.zeros(4).long(), TypeError, "must be int64"),
    ],
)
def test_what_does_not_fit_is_refused(predictions, targets, error, message):
    with pytest.raises(error, match=message):
        ConfusionMatrix(7).update(predictions, targets)


def test_a_state_of_something_else_is_refused():
    for state in ({"step": torch.tensor(1)}, ConfusionMatrix(3).state_dict()):
        with pytest.raises(ValueError, match="a state holds cells"):
            ConfusionMatrix(2).merge(state)
    with pytest.raises(ValueError, match="at least 2, got 1"):
        ConfusionMatrix(1)
