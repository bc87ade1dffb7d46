import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from flambeau.recipes.memory.sequential_checkpointing import checkpoint_segments, segment_peaks

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def make(blocks: int = 7) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.ReLU(inplace=True)
            )
            for _ in range(blocks)
        )
    )


def train(model: nn.Module, **autocast: Any) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(6, 4, device=next(model.parameters()).device)
    with torch.autocast(x.device.type, enabled=bool(autocast), **autocast):
        output = model(x)
    output.float().square().mean().backward()
    return [output.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("num_segments", [None, 1, 2, 3, 7])
def test_equals_the_plain_model_to_the_bit(num_segments: int | None) -> None:
    model = make()
    assert checkpoint_segments(model, num_segments=num_segments) is model
    assert_same(train(model), train(make()))
    assert model[0][1].num_batches_tracked == 1


def test_keeps_autocast() -> None:
    model = checkpoint_segments(make())
    assert_same(train(model, dtype=torch.bfloat16), train(make(), dtype=torch.bfloat16))


def test_gradients_are_torchs_and_its_statistics_count_twice() -> None:
    theirs = make()
    torch.manual_seed(1)
    x = torch.randn(6, 4)
    checkpoint_sequential(theirs, 3, x, use_reentrant=False).square().mean().backward()
    ours = checkpoint_segments(make(), num_segments=3)
    train(ours)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)
    assert (theirs[0][1].num_batches_tracked, ours[0][1].num_batches_tracked) == (2, 1)


class Held:
    """Elements that the graph holds, each storage once: what MEM-10 counts."""

    def __init__(self) -> None:
        self.storages: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        self.storages[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor.detach()

    def of(self, model: nn.Module, x: Tensor) -> int:
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            output = model(x)
        del output
        return sum(t.untyped_storage().nbytes() // 4 for t in self.storages.values())


@pytest.mark.parametrize(
    ("num_segments", "numel"), [(1, 395_264), (2, 200_704), (8, 65_536), (32, 77_824)]
)
def test_saved_elements_are_those_of_the_notes(num_segments: int, numel: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(64)))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_parameter("bias", None)
    checkpoint_segments(model, num_segments=num_segments)
    assert Held().of(model, torch.ones(32, 64, requires_grad=True)) == numel


def test_the_square_root_is_the_default_and_measured_peaks_agree() -> None:
    """Layers without weights, so that nothing but activations counts: n / k + k of them live at the peak."""
    model = nn.Sequential(*(nn.Tanh() for _ in range(16)))
    peaks = segment_peaks(model, torch.ones(256, requires_grad=True))
    assert list(peaks) == [1, 2, 4, 8, 16]
    assert min(peaks, key=lambda count: peaks[count]) == 4
    assert peaks[4] < 0.6 * peaks[1]
    assert checkpoint_segments(model).forward.num_segments == 4
    # 16 outputs, the loss and its gradient, two gradients of 1 KB on the way
    assert peaks[1] == pytest.approx(18 * 1024, rel=0.05)


def test_peaks_change_nothing_and_ignore_an_earlier_call() -> None:
    model, plain = make(), make()
    before = segment_peaks(model, torch.ones(6, 4), counts=[1, 3])
    checkpoint_segments(model, num_segments=2)
    assert segment_peaks(model, torch.ones(6, 4), counts=[1, 3]) == before
    assert model.forward.num_segments == 2
    assert_same(list(model.state_dict().values()), list(plain.state_dict().values()))
    assert all(p.grad is None for p in model.parameters())


def test_names_copies_and_undo() -> None:
    model = checkpoint_segments(make())
    assert list(model.state_dict()) == list(make().state_dict())
    expected = train(make())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.forward.module is other
        assert_same(train(other), expected)
    checkpoint_segments(model, num_segments=1)
    assert "forward" not in model.__dict__


def test_eval_and_no_grad() -> None:
    model, x = checkpoint_segments(make()).eval(), torch.randn(3, 4)
    with torch.no_grad():
        assert_same([model(x)], [make().eval()(x)])


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


def test_refused() -> None:
    for count in (0, 8, -1):
        with pytest.raises(ValueError, match=rf"num_segments must be in 1 to 7 .* got {count}"):
            checkpoint_segments(make(), num_segments=count)
    with pytest.raises(TypeError, match=r"a plain nn\.Sequential is needed, got Own"):
        checkpoint_segments(Own(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="got ModuleList"):
        checkpoint_segments(nn.ModuleList([nn.Linear(2, 2)]))  # type: ignore[arg-type]


def test_a_segment_that_changes_its_input_is_refused() -> None:
    blocks = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2)) for _ in range(4)]
    model, x = nn.Sequential(nn.Linear(2, 2), *blocks), torch.randn(3, 2)
    with pytest.raises(ValueError, match="the segment of children 1 to 2 changes its input"):
        checkpoint_segments(model, num_segments=3)(x)
    with pytest.raises(ValueError, match="make its first activation inplace=False"):
        segment_peaks(model, x, counts=[1, 3])
    with torch.no_grad():
        model(x)
    for block in blocks:
        block[0].inplace = False
    model(x).sum().backward()


@pytest.mark.gpu
@needs_cuda
def test_cuda_peak_is_the_measured_one() -> None:
    model = nn.Sequential(*(nn.Tanh() for _ in range(16)))
    x = torch.ones(2**20, device="cuda", requires_grad=True)
    for count, peak in segment_peaks(model, x).items():
        checkpoint_segments(model, num_segments=count)
        x.grad = None
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x).mean().backward()
        assert torch.cuda.max_memory_allocated() - start == pytest.approx(peak, rel=0.1)
