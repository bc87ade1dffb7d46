import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from flambeau.recipes.memory.activation_checkpointing import (
    checkpoint_modules,
    checkpoint_segments,
    checkpointed_modules,
    undo_checkpoints,
)
from flambeau.recipes.memory.memory_budget import estimate_memory

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
BLOCKS = ["layers.0", "layers.1", "layers.2"]


class Block(nn.Module):
    """Statistics by both rules (momentum, cumulative), dropout, an in-place ReLU, a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.last_norm = nn.BatchNorm2d(4, momentum=None)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        inside = self.norm(self.first(x)).relu_()
        return torch.relu_(x + scale * self.dropout(self.last_norm(self.second(inside))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 1)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.layers:
            x = block(x, scale=0.5)
        return self.head(x.mean((2, 3)))


def make(*, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def train(model: nn.Module, *, steps: int = 3, **autocast: Any) -> list[Tensor]:
    """Real steps; gives every output and gradient, and what parameters and buffers are in the end."""
    like = next(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(4, 2, 6, 6, device=like.device, dtype=like.dtype)
        with torch.autocast(like.device.type, enabled=bool(autocast), **autocast):
            output = model(x)
        output.float().square().mean().backward()
        seen += [
            output.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [t.clone() for t in model.state_dict().values()]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@contextmanager
def counting_saved() -> Iterator[list[int]]:
    """Elements that the graph holds outside of checkpoints."""
    total = [0]

    def pack(tensor: Tensor) -> Tensor:
        total[0] += tensor.numel()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_the_plain_model_to_the_bit(dtype: torch.dtype) -> None:
    model = make(dtype=dtype)
    assert checkpoint_modules(model, "layers.*") is model
    assert checkpointed_modules(model) == BLOCKS
    assert_same(train(model), train(make(dtype=dtype)))


def test_keeps_autocast() -> None:
    model = checkpoint_modules(make(), "layers.*")
    expected = train(make(), dtype=torch.bfloat16)
    assert expected[0].dtype == torch.bfloat16
    assert_same(train(model, dtype=torch.bfloat16), expected)


def test_statistics_are_updated_once_and_torchs_checkpoint_does_it_twice() -> None:
    x = torch.randn(4, 4, 6, 6)
    block = Block()
    naive, ours = copy.deepcopy(block), nn.Sequential(copy.deepcopy(block))
    checkpoint(naive, x, use_reentrant=False).sum().backward()
    checkpoint_modules(ours, "0")(x).sum().backward()
    assert naive.norm.num_batches_tracked == 2
    assert ours[0].norm.num_batches_tracked == 1
    block(x)
    assert_same(list(ours[0].buffers()), list(block.buffers()))


def test_saves_less() -> None:
    x = torch.randn(2, 2, 6, 6)
    with counting_saved() as plain:
        make()(x)
    with counting_saved() as less:
        checkpoint_modules(make(), "layers.*")(x)
    assert less[0] < plain[0] / 4


def test_a_retained_graph_recomputes_again() -> None:
    model = checkpoint_modules(make(), "layers.*")
    loss = model(torch.ones(2, 2, 6, 6)).sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert_same(list(first), list(second))
    assert model.layers[0].norm.num_batches_tracked == 1


def test_two_forward_passes_before_the_backward() -> None:
    def both(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(2)
        (model(torch.ones(2, 2, 4, 4)).sum() + model(torch.randn(3, 2, 4, 4)).sum()).backward()
        return [p.grad for p in model.parameters()] + list(model.buffers())

    assert_same(both(checkpoint_modules(make(), "layers.*")), both(make()))


def test_eval_and_no_grad_recompute_nothing() -> None:
    model, plain = checkpoint_modules(make(), "layers.*").eval(), make().eval()
    x = torch.randn(2, 2, 6, 6)
    assert_same([model(x)], [plain(x)])
    with torch.inference_mode():
        assert_same([model(x)], [plain(x)])
    model(x).sum().backward()
    assert model.layers[0].norm.num_batches_tracked == 0


def test_frozen_statistics_and_inputs_without_gradient() -> None:
    """The first module of a model: its input needs no gradient, its parameters do."""

    def run(model: nn.Sequential) -> list[Tensor]:
        model[1].eval()
        model(torch.ones(2, 2)).sum().backward()
        return [p.grad for p in model.parameters()] + list(model.buffers())

    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    assert_same(run(checkpoint_modules(copy.deepcopy(plain), "[01]")), run(plain))


def test_names_stay_and_state_dicts_load_both_ways() -> None:
    model, plain = checkpoint_modules(make(), "layers.*"), make()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert isinstance(model.layers[0], Block)
    plain.load_state_dict(model.state_dict())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_recompute_with_their_own_weights(how: str) -> None:
    model = checkpoint_modules(make(), "layers.*")
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert other.layers[0].forward.module is other.layers[0]
    expected = train(make())
    assert_same(train(other), expected)
    assert_same(train(model), expected)  # untouched by the training of its copy


def test_undo() -> None:
    model = checkpoint_modules(make(), "layers.*")
    assert undo_checkpoints(model) is model
    assert checkpointed_modules(model) == []
    assert "forward" not in model.layers[0].__dict__
    assert_same(train(model), train(make()))


def test_outermost_of_nested_matches_and_containers_by_their_members() -> None:
    assert checkpointed_modules(checkpoint_modules(make(), "layers*", "*.norm")) == BLOCKS
    assert checkpointed_modules(checkpoint_modules(make(), "*.1", "head")) == ["layers.1", "head"]
    twice = checkpoint_modules(checkpoint_modules(make(), "layers.0"), "layers.*")
    assert checkpointed_modules(twice) == BLOCKS


def test_a_module_under_two_names() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    plain = copy.deepcopy(model)
    assert checkpointed_modules(checkpoint_modules(model, "2")) == ["0"]
    for net in (model, plain):
        net(torch.ones(1, 2)).sum().backward()
    assert_same([shared.weight.grad], [plain[0].weight.grad])


def test_ddp_equals_the_plain_model(tmp_path: Any) -> None:
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(checkpoint_modules(make(), "layers.*"))
        assert_same(train(wrapped), train(make()))
    finally:
        destroy_process_group()


def test_meta_device() -> None:
    model = checkpoint_modules(make().to("meta"), "layers.*")
    for block in model.layers:
        block.last_norm.momentum = 0.1  # the cumulative average reads its counter
    model(torch.ones(2, 2, 6, 6, device="meta")).sum().backward()
    assert model.stem.weight.grad.device.type == "meta"


@pytest.mark.parametrize(
    ("prepare", "pattern", "message"),
    [
        (
            (),
            "layer.*",
            "'layer.[*]' matches no module with a forward pass; the nearest is 'layers.[0-2]'",
        ),
        ((), "layers", "matches no module with a forward pass"),
        (("layers.1",), "layers.1.norm", "layers.1.norm and layers.1 are nested"),
        (("layers.1.norm",), "layers.1", "layers.1 and layers.1.norm are nested"),
    ],
)
def test_refused(prepare: tuple[str, ...], pattern: str, message: str) -> None:
    model = checkpoint_modules(make(), *prepare)
    with pytest.raises(ValueError, match=message):
        checkpoint_modules(model, "head", pattern)
    assert checkpointed_modules(model) == list(prepare)


def test_a_forward_of_somebody_else_is_refused() -> None:
    model = make()
    model.head.forward = lambda x: x
    with pytest.raises(ValueError, match="head: another library has replaced its forward"):
        checkpoint_modules(model, "head")


def test_a_module_that_changes_its_input_is_refused_at_the_first_forward_pass() -> None:
    """What VGG's features are; autograd would only say so in the backward pass, and name no module."""
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(2, 2, 1))
    x = torch.randn(1, 2, 3, 3)
    checkpoint_modules(model, "1")
    with torch.inference_mode():
        model(x.clone())
    with pytest.raises(ValueError, match=r"^1 changes its input in place.* inplace=False"):
        model(x)
    model[0].requires_grad_(False)  # then nothing is recomputed, and nothing is wrong
    model(x).sum().backward()

    class Keyword(nn.Module):
        def forward(self, *, parts: list[Tensor]) -> Tensor:
            return parts[0].exp_()

    outer = nn.Module()
    outer.inner = Keyword()
    checkpoint_modules(outer, "inner")
    with pytest.raises(ValueError, match="inner changes its input"):
        outer.inner(parts=[torch.ones(2, requires_grad=True) * 1])


@pytest.mark.gpu
@needs_cuda
def test_cuda_peak_is_lower_and_gradients_are_equal() -> None:
    def peak(model: nn.Module) -> tuple[int, list[Tensor]]:
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        torch.manual_seed(3)
        model(torch.ones(8, 2, 64, 64, device="cuda")).sum().backward()
        return torch.cuda.max_memory_allocated() - start, [p.grad for p in model.parameters()]

    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        plain, expected = peak(make().cuda())
        less, got = peak(checkpoint_modules(make().cuda(), "layers.*"))
    assert less < 0.8 * plain
    assert_same(got, expected)


# ---------------------------------------------------------------- segments


def chain(blocks: int = 7) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.ReLU(inplace=True)
            )
            for _ in range(blocks)
        )
    )


def train_chain(model: nn.Module, **autocast: Any) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(6, 4, device=next(model.parameters()).device)
    with torch.autocast(x.device.type, enabled=bool(autocast), **autocast):
        output = model(x)
    output.float().square().mean().backward()
    return [output.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("num_segments", [None, 1, 2, 3, 7])
def test_segments_equal_the_plain_model_to_the_bit(num_segments: int | None) -> None:
    model = chain()
    assert checkpoint_segments(model, num_segments=num_segments) is model
    assert_same(train_chain(model), train_chain(chain()))
    assert model[0][1].num_batches_tracked == 1


def test_segments_keep_autocast() -> None:
    model = checkpoint_segments(chain())
    assert_same(
        train_chain(model, dtype=torch.bfloat16), train_chain(chain(), dtype=torch.bfloat16)
    )


def test_gradients_are_torchs_and_its_statistics_count_twice() -> None:
    theirs = chain()
    torch.manual_seed(1)
    x = torch.randn(6, 4)
    checkpoint_sequential(theirs, 3, x, use_reentrant=False).square().mean().backward()
    ours = checkpoint_segments(chain(), num_segments=3)
    train_chain(ours)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)
    assert (theirs[0][1].num_batches_tracked, ours[0][1].num_batches_tracked) == (2, 1)


class Held:
    """Elements that the graph holds, each storage once: what torch has saved."""

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
def test_saved_elements_of_64_layers_at_several_counts(num_segments: int, numel: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(64)))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_parameter("bias", None)
    checkpoint_segments(model, num_segments=num_segments)
    assert Held().of(model, torch.ones(32, 64, requires_grad=True)) == numel


def test_the_square_root_is_the_default_and_the_least_peak() -> None:
    """One weight, so that nothing but activations counts: n / k + k of them live at the peak."""
    peaks = {}
    for count in (1, 2, 4, 8, 16):
        model = nn.Sequential(nn.PReLU(), *(nn.Tanh() for _ in range(15)))
        checkpoint_segments(model, num_segments=count)
        x = torch.ones(256, requires_grad=True)
        peaks[count] = estimate_memory(model, (x,), optimizer=torch.optim.SGD).peak
    assert min(peaks, key=lambda count: peaks[count]) == 4
    assert peaks[4] < 0.6 * peaks[1]
    assert checkpoint_segments(model).forward.num_segments == 4


def test_names_and_copies_of_segments() -> None:
    model = checkpoint_segments(chain())
    assert list(model.state_dict()) == list(chain().state_dict())
    expected = train_chain(chain())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.forward.module is other
        assert_same(train_chain(other), expected)
    checkpoint_segments(model, num_segments=1)
    assert "forward" not in model.__dict__


def test_segments_in_eval_without_gradients() -> None:
    model, x = checkpoint_segments(chain()).eval(), torch.randn(3, 4)
    with torch.no_grad():
        assert_same([model(x)], [chain().eval()(x)])


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


def test_segments_refused() -> None:
    for count in (0, 8, -1):
        with pytest.raises(ValueError, match=rf"num_segments must be in 1 to 7 .* got {count}"):
            checkpoint_segments(chain(), num_segments=count)
    with pytest.raises(TypeError, match=r"a plain nn\.Sequential is needed, got Own"):
        checkpoint_segments(Own(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="got ModuleList"):
        checkpoint_segments(nn.ModuleList([nn.Linear(2, 2)]))  # type: ignore[arg-type]


def test_a_segment_that_changes_its_input_is_refused() -> None:
    blocks = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2)) for _ in range(4)]
    model, x = nn.Sequential(nn.Linear(2, 2), *blocks), torch.randn(3, 2)
    with pytest.raises(ValueError, match="the segment of children 1 to 2 changes its input"):
        checkpoint_segments(model, num_segments=3)(x)
    with torch.no_grad():
        model(x)
    for block in blocks:
        block[0].inplace = False
    model(x).sum().backward()


def test_undo_and_nesting() -> None:
    model = nn.Sequential(checkpoint_segments(chain()), nn.Linear(4, 2))
    assert checkpointed_modules(model) == ["0"]
    with pytest.raises(ValueError, match=r"0\.1 and 0 are nested"):
        checkpoint_modules(model, "0.1")
    undo_checkpoints(model)
    assert "forward" not in model[0].__dict__
