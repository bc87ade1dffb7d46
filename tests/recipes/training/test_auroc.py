import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flambeau.recipes.training.auroc import AUROC

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "bincount", "masked_select"}


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def samples(num_samples: int = 200, num_classes: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_samples, num_classes, generator=generator)
    return logits, torch.randint(num_classes, (num_samples,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rounded", [False, True])
def test_two_classes_are_those_of_scikit_learn(dtype, rounded):
    logits, targets = samples()
    logits = (logits.round() if rounded else logits).to(dtype)  # with many ties, or none
    area, scores = AUROC(), AUROC()
    for rows in (slice(0, 50), slice(50, 50), slice(50, 200)):
        area.update(logits[rows], targets[rows])
        scores.update(logits[rows, 1].float() - logits[rows, 0].float(), targets[rows])
    difference = logits[:, 1].double() - logits[:, 0].double()
    expected = roc_auc_score(targets, difference)
    assert float(area.compute()) == pytest.approx(expected, rel=1e-12)
    assert torch.equal(area.compute(), scores.compute())
    assert area.compute().dtype == torch.float64


def test_many_classes_are_those_of_scikit_learn():
    logits, targets = samples(num_classes=6)
    area = AUROC()
    area.update(logits.double(), targets)
    expected = roc_auc_score(targets, logits.double().softmax(1), multi_class="ovr")
    assert float(area.compute()) == pytest.approx(expected, rel=1e-12)
    assert area.per_class().shape == (6,)


def test_a_class_without_a_sample_is_in_no_mean():
    logits, targets = samples(num_classes=3)
    area = AUROC()
    area.update(logits, targets.clamp(max=1))
    assert area.per_class().isnan().tolist() == [False, False, True]
    torch.testing.assert_close(area.compute(), area.per_class()[:2].mean())
    alone = AUROC()
    alone.update(torch.rand(4), torch.ones(4).long())
    assert alone.compute().isnan()
    broken = AUROC()
    broken.update(torch.tensor([0.1, torch.nan]), torch.tensor([0, 1]))
    assert broken.compute().isnan()


def test_parts_and_states():
    logits, targets = samples(num_classes=4)
    whole, first, second = AUROC(), AUROC(), AUROC()
    whole.update(logits, targets)
    first.update(logits[:70], targets[:70])
    second.update(logits[70:], targets[70:])
    first.merge(AUROC().state_dict())
    first.merge(second.state_dict())
    assert torch.equal(first.compute(), whole.compute())
    second.load_state_dict(whole.state_dict())
    assert torch.equal(second.compute(), whole.compute())
    second.reset()
    with pytest.raises(ValueError, match="no samples since the last reset"):
        second.compute()


def test_a_batch_is_kept_without_waiting_and_as_a_copy():
    logits, targets = samples()
    area = AUROC()
    scores = logits[:, 0].clone().requires_grad_()
    with Recorder() as recorder:
        area.update(scores, targets)
    assert recorder.names
    assert not recorder.names & WAITS
    before = area.compute()
    assert not before.requires_grad
    scores.detach().zero_()
    assert torch.equal(area.compute(), before)
    meta = AUROC()
    meta.update(logits.to("meta"), targets.to("meta"))
    assert meta.state_dict()["scores"].device.type == "meta"


def test_what_does_not_fit_is_refused():
    area = AUROC()
    for logits in (torch.zeros(4, 3), torch.zeros(3, 1), torch.zeros(3, 2, 2)):
        with pytest.raises(ValueError, match="logits must be"):
            area.update(logits, torch.zeros(3).long())
    with pytest.raises(TypeError, match="targets must be int64"):
        area.update(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match="keys scores and targets"):
        area.merge({"step": torch.tensor(1)})
    area.update(torch.zeros(3), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"classes in \[0, 2\)"):
        area.compute()
    with pytest.raises(ValueError, match="as many classes"):
        area.update(torch.zeros(3, 4), torch.zeros(3).long())
    with pytest.raises(ValueError, match="as many classes"):
        other = AUROC()
        other.update(torch.zeros(3, 4), torch.zeros(3).long())
        area.merge(other.state_dict())
