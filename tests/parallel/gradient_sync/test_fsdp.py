"""A sharded model trains as a whole one does, and each rank keeps a part of it alone."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.gradient_sync.fsdp import Shards, shard_model, units
from flambeau.parallel.ranks import Ranks, join_ranks
from flambeau.recipes.training.amp_step import AmpStep
from flambeau.recipes.training.ema import EMA

CPU = torch.device("cpu")
StartRanks = Callable[..., Any]


class Block(nn.Module):
    """Odd sizes, a parameter with one element, a frozen one, a buffer that every pass writes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.scale = nn.Parameter(torch.ones(1))
        self.down.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks between an embedding and a head that is tied to it."""

    def __init__(self, width: int = 7, classes: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Linear(width, classes, bias=False)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(3)])
        self.head = nn.Linear(width, classes)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x @ self.embedding.weight.T @ self.embedding.weight))
        return out


def make_model() -> Net:
    torch.manual_seed(3)
    return Net()


def make_optimizer(kind: str, model: nn.Module) -> Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if kind == "sgd":
        return SGD(groups, lr=0.2, momentum=0.9, nesterov=True, fused=True)
    return AdamW(groups, lr=0.02, fused=kind == "fused adamw")


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(13, 7, generator=generator), torch.randint(5, (13,), generator=generator))
        for _ in range(4)
    ]


def expected(
    kind: str, max_norm: float
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """A plain loop of torch's: weights, averages, norms."""
    model = make_model()
    optimizer = make_optimizer(kind, model)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    average.update_parameters(model)
    norms = []
    for x, y in batches():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        average.update_parameters(model)
    return dict(model.named_parameters()), dict(average.module.named_parameters()), norms


def micro(size: int) -> MicroBatch:
    nothing: Any = None
    return MicroBatch(nothing, nothing, size, 13, 1, True, False, 0, (), True, 0)


def train(kind: str, max_norm: float) -> tuple[Any, ...]:
    """The same on this rank: two uneven micro-batches, shares of different sizes."""
    torch.set_num_threads(1)
    ranks = join_ranks()
    model = make_model()
    if ranks.rank:  # rank 0's weights count
        nn.init.constant_(model.embedding.weight, 3.0)
    shard_model(model, ranks, CPU, unit_bytes=500)
    optimizer = make_optimizer(kind, model)
    shards = Shards(model, ranks, max_norm=max_norm)
    shards.adopt(optimizer)
    amp = AmpStep(optimizer, halt=True)
    ema = EMA(shards.pieces, decay=0.5, warmup=False)
    norms = []
    for x, y in batches():
        for low, high in ((0, 8), (8, 13)):
            bounds = [low + (high - low) * k // ranks.world for k in range(ranks.world + 1)]
            mine = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
            share = len(y[mine])
            shards.before_batch(micro(share))
            loss = cross_entropy(model(x[mine]), y[mine])
            amp.backward(loss, weight=ranks.world * share / 13)
        shards.after_backward()
        amp.step(watch=[shards.norm])
        ema.update()
        norms.append(float(shards.norm))
    with ema.applied():
        averages = whole(model)
    return whole(model), averages, norms, [t.shape for t in shards.pieces.parameters()]


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a sharded model, gathered by torch."""
    found = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        found[name] = p.detach().full_tensor().clone()
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("kind", "max_norm"), [("sgd", 0.5), ("fused adamw", 1e9), ("adamw", 0.5)])
def test_trains_as_one_process(
    start_ranks: StartRanks, world: int, kind: str, max_norm: float
) -> None:
    weights, averages, norms = expected(kind, max_norm)
    assert kind != "sgd" or max(norms) > max_norm
    for found in start_ranks(world, train, kind, max_norm, group=True).results():
        torch.testing.assert_close(found[0], weights, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(found[1], averages, rtol=1e-4, atol=2e-6)
        assert found[2] == pytest.approx(norms, rel=1e-5)


# ---------------------------------------------------------------- what a rank holds


def held() -> tuple[int, int, int, int]:
    torch.set_num_threads(1)
    ranks, model = (
        join_ranks(),
        nn.Sequential(*[nn.Sequential(nn.Linear(64, 64)) for _ in range(4)]),
    )
    full_bytes = sum(p.numel() * 4 for p in model.parameters())
    shard_model(model, ranks, CPU, unit_bytes=1)
    optimizer = AdamW(model.parameters(), fused=True)
    shards = Shards(model, ranks)
    shards.adopt(optimizer)
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(torch.ones(2, 64)).sum()
    weights = {t.untyped_storage().data_ptr(): t for t in kept if t.shape == (64, 64)}
    # FSDP drops what it has gathered by making the storage empty.
    saved_bytes = sum(t.untyped_storage().nbytes() for t in weights.values())
    loss.backward()
    shards.after_backward()
    optimizer.step()
    own_bytes = sum(p.numel() * 4 for p in shards.pieces.parameters())
    state = [t for entry in optimizer.state.values() for t in entry.values() if t.dim()]
    return full_bytes, own_bytes, sum(t.numel() * 4 for t in state), saved_bytes


@pytest.mark.parametrize("world", [2, 4])
def test_memory_of_a_rank_falls(start_ranks: StartRanks, world: int) -> None:
    for full_bytes, own_bytes, state_bytes, saved_bytes in start_ranks(
        world, held, group=True
    ).results():
        assert own_bytes == full_bytes / world
        assert state_bytes == 2 * full_bytes / world
        assert saved_bytes == 0


def saved_for_backward(gather_dtype: torch.dtype | None) -> tuple[float, int]:
    torch.set_num_threads(1)
    ranks = join_ranks()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    shard_model(model, ranks, CPU, unit_bytes=1, gather_dtype=gather_dtype)
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.linspace(-1, 1, 128).view(2, 64)).float().square().mean()
    weights = {t.untyped_storage().data_ptr(): t for t in kept if t.shape == (64, 64)}
    saved_bytes = sum(t.untyped_storage().nbytes() for t in weights.values())
    loss.backward()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    return float(loss.detach()), saved_bytes


def test_gathered_in_half_precision_no_copy_stays(start_ranks: StartRanks) -> None:
    (plain, copied), _ = start_ranks(2, saved_for_backward, None, group=True).results()
    (gathered, left), _ = start_ranks(2, saved_for_backward, torch.bfloat16, group=True).results()
    # What autocast alone keeps until backward: of all layers but the first, whose input has no gradient.
    assert copied == 3 * 64 * 64 * 2
    assert left == 0
    assert gathered == pytest.approx(plain, rel=1e-2)


def half_with_batch_norm() -> list[torch.dtype]:
    torch.set_num_threads(1)
    ranks = join_ranks()
    model = nn.Sequential(
        nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))),
        nn.BatchNorm1d(4),
    )
    shard_model(model, ranks, CPU, unit_bytes=1, gather_dtype=torch.bfloat16)
    seen = []
    for layer in (model[0][0][0], model[1]):
        layer.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(3, 4)).sum().backward()
    return seen


def test_batch_norm_is_gathered_in_float32(start_ranks: StartRanks) -> None:
    found = start_ranks(2, half_with_batch_norm, group=True).results()
    assert found == [[torch.bfloat16, torch.float32]] * 2


# ---------------------------------------------------------------- steps that must not happen


def bad_gradient(value: float) -> tuple[bool, float, float]:
    """One element of one gradient goes bad, on the rank that holds it."""
    torch.set_num_threads(1)
    ranks, model = join_ranks(), make_model()
    shard_model(model, ranks, CPU, unit_bytes=500)
    optimizer = make_optimizer("sgd", model)
    shards = Shards(model, ranks, max_norm=1.0)
    shards.adopt(optimizer)
    amp = AmpStep(optimizer, halt=True)
    before = [p.detach().clone() for p in shards.pieces.parameters()]
    x, y = batches()[0]
    amp.backward(cross_entropy(model(x), y))
    gradient = model.blocks[1].up.weight.grad
    assert isinstance(gradient, DTensor)
    if ranks.rank == ranks.world - 1:
        gradient.to_local()[0, 0] = value
    shards.after_backward()
    gradients = [p.grad for p in shards.pieces.parameters() if p.grad is not None]
    assert all(
        gradient.isnan().all() for gradient in gradients
    )  # as fp16 needs to skip on all ranks
    amp.step(watch=[shards.norm])
    after = list(shards.pieces.parameters())
    same = all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    return same, float(amp.halted), float(shards.norm)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_gradient_that_is_not_finite_on_one_rank_stops_all(
    start_ranks: StartRanks, value: float
) -> None:
    for same, halted, norm in start_ranks(3, bad_gradient, value, group=True).results():
        assert same
        assert halted == 1
        assert not norm < float("inf")


def scaled() -> tuple[float, list[Tensor]]:
    torch.set_num_threads(1)
    ranks, model = join_ranks(), make_model()
    shard_model(model, ranks, CPU, unit_bytes=500)
    shards = Shards(model, ranks, max_norm=0.25)
    x, y = batches()[0]
    (cross_entropy(model(x), y) * 1024).backward()
    shards.after_backward(scale=torch.tensor(1024.0))
    gradients = [p.grad for p in shards.pieces.parameters() if p.grad is not None]
    square = torch.stack(torch._foreach_norm(gradients)).square().sum()
    dist.all_reduce(square)
    return float(shards.norm), float(square.sqrt()) / 1024


def test_clipping_sees_through_the_loss_scale(start_ranks: StartRanks) -> None:
    model = make_model()
    x, y = batches()[0]
    cross_entropy(model(x), y).backward()
    norm = float(
        nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    )
    for before, after in start_ranks(2, scaled, group=True).results():
        assert before == pytest.approx(norm, rel=1e-5)
        assert after == pytest.approx(0.25, rel=1e-4)


# ---------------------------------------------------------------- evaluation, buffers, layouts


def evaluated() -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
    """Evaluation comes first, with averages in place of the weights; then a step; then buffers are shared."""
    torch.set_num_threads(1)
    ranks, model = join_ranks(), make_model()
    shard_model(model, ranks, CPU, unit_bytes=500)
    shards = Shards(model, ranks)
    ema = EMA(shards.pieces, decay=0.5)
    x, y = batches()[0]
    for name, tensor in ema.shadow.items():
        if name in dict(shards.pieces.named_parameters()):
            tensor.mul_(2)
    with torch.inference_mode(), ema.applied():
        average = model(x)
    with torch.inference_mode():
        plain = model(x)
    cross_entropy(model(x), y).backward()
    model.blocks[0].calls.fill_(ranks.rank + 1)
    ema.shadow["blocks.0.calls"].fill_(ranks.rank + 5)
    shards.share_statistics(ema.shadow)
    buffers = dict(model.named_buffers()) | {"average": ema.shadow["blocks.0.calls"]}
    return average, plain, buffers


def test_evaluation_with_averages_before_the_first_step(start_ranks: StartRanks) -> None:
    x, _ = batches()[0]
    model = make_model()
    plain = model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    average = model(x)
    for found in start_ranks(3, evaluated, group=True).results():
        torch.testing.assert_close(found[0], average.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1], plain.detach(), rtol=1e-5, atol=1e-5)
        assert found[2]["blocks.0.calls"] == 1
        assert found[2]["average"] == 5
        assert found[2]["blocks.2.mask"].tolist() == [True, False]


def written_buffer() -> list[float]:
    """What the forward pass of rank r adds to a buffer is r + 1."""
    torch.set_num_threads(1)
    ranks, model = join_ranks(), nn.Sequential(Drift())
    model[0].rank = ranks.rank
    shard_model(model, ranks, CPU)
    shards = Shards(model, ranks)
    seen = []
    for _ in range(3):
        shards.before_batch(micro(1))
        seen.append(float(model[0].drift))
        model(torch.ones(1, 4)).sum().backward()
        shards.after_backward()
    return seen


class Drift(nn.Module):
    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("drift", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.drift += self.rank + 1
        return x * self.weight * self.drift


def test_buffers_that_training_reads_are_those_of_rank_0(start_ranks: StartRanks) -> None:
    assert start_ranks(2, written_buffer, group=True).results() == [[0.0, 1.0, 2.0]] * 2


def laid_out() -> tuple[dict[str, Any], list[Any], list[tuple[int, ...]], bool]:
    torch.set_num_threads(1)
    ranks, model = join_ranks(), make_model()
    model.to(memory_format=torch.channels_last)
    shard_model(model, ranks, CPU, unit_bytes=500)
    shards = Shards(model, ranks)
    layout = shards.adopt(make_optimizer("sgd", model))
    shapes = {name: tuple(t.shape) for name, t in shards.pieces.state_dict().items()}
    assert shapes == {name: piece.sizes for name, piece in layout.model.items()}
    tied = shards.pieces.head.weight is shards.pieces.embedding.weight  # type: ignore[union-attr]
    return dict(layout.model), list(layout.parameters), list(shapes.values()), tied


def test_layout_covers_every_tensor_once(start_ranks: StartRanks) -> None:
    found = start_ranks(3, laid_out, group=True).results()
    model = make_model()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert list(found[0][0]) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        pieces = [layout[name] for layout, *_ in found]
        if name in parameters:
            marked = torch.zeros(tensor.shape)
            for piece in pieces:
                piece.of(marked).add_(1)
            assert marked.eq(1).all(), name
        else:
            assert all(piece.sizes == piece.shape == tuple(tensor.shape) for piece in pieces)
    groups = make_optimizer("sgd", model).param_groups
    order = [tuple(p.shape) for group in groups for p in group["params"]]
    assert [piece.shape for piece in found[1][1]] == order
    assert all(tied for *_, tied in found)


def convolution() -> tuple[torch.Size, Tensor]:
    torch.set_num_threads(1)
    ranks = join_ranks()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3)).to(memory_format=torch.channels_last)
    shard_model(model, ranks, CPU)
    out = model(torch.ones(1, 3, 8, 8).to(memory_format=torch.channels_last))
    return Shards(model, ranks).pieces.state_dict()["0.weight"].shape, out.detach()


def test_channels_last_convolutions(start_ranks: StartRanks) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    for shape, out in start_ranks(2, convolution, group=True).results():
        assert shape == (4, 3, 3, 3)
        torch.testing.assert_close(
            out, model(torch.ones(1, 3, 8, 8)).detach(), rtol=1e-5, atol=1e-6
        )


# ---------------------------------------------------------------- which blocks


def linear_pair(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def test_units_are_repeated_blocks_of_enough_bytes() -> None:
    block_bytes = 4 * sum(p.numel() for p in Block(7).parameters())
    model = make_model()
    assert units(model, block_bytes) == list(model.blocks)
    assert units(model, block_bytes + 1) == []
    assert units(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), 1) == []


def test_units_go_from_the_inside_out() -> None:
    class Stage(nn.Module):
        def __init__(self, own: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([linear_pair(8) for _ in range(2)])
            self.own = nn.Linear(own, own)

    lean = nn.ModuleDict({"a": Stage(1), "b": Stage(1)})
    blocks = list(itertools.chain(lean["a"].blocks, lean["b"].blocks))  # type: ignore[arg-type]
    assert {id(m) for m in units(lean, 400)} == {id(m) for m in blocks}
    rich = nn.ModuleDict({"a": Stage(20), "b": Stage(20)})
    found = units(rich, 400)
    assert len(found) == 6
    assert found[-2:] == [rich["a"], rich["b"]]
    lists = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8)]) for _ in range(2)])
    assert units(lists, 1) == []  # a list has no forward pass that would gather it


def test_units_share_nothing_with_the_rest() -> None:
    model = make_model()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    assert units(model, 1) == [model.blocks[2]]


# ---------------------------------------------------------------- refusals


def test_without_a_process_group() -> None:
    with pytest.raises(InputError, match="needs the processes of a job"):
        shard_model(make_model(), Ranks(0, 1, None), CPU)


def refused() -> dict[str, str]:
    torch.set_num_threads(1)
    ranks, found = join_ranks(), {}

    def attempt(name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except (InputError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    number = nn.Linear(2, 2)
    number.temperature = nn.Parameter(torch.ones(()))
    attempt("number", lambda: shard_model(number, ranks, CPU))
    attempt("meta", lambda: shard_model(nn.Linear(2, 2, device="meta"), ranks, CPU))
    few = nn.Linear(2, 1)
    shard_model(few, ranks, CPU)
    fp16 = Shards(few, ranks)
    attempt("fp16", lambda: fp16.after_backward(scale=torch.ones(())))
    model = make_model()
    shard_model(model, ranks, CPU)
    attempt("twice", lambda: shard_model(model, ranks, CPU))
    shards = Shards(model, ranks)
    attempt("optimizer", lambda: shards.adopt(Adafactor(model.parameters())))
    stepped = make_optimizer("adamw", model)
    x, y = batches()[0]
    cross_entropy(model(x), y).backward()
    stepped.step()
    attempt("stepped", lambda: shards.adopt(stepped))
    return found


def test_refusals(start_ranks: StartRanks) -> None:
    found = start_ranks(2, refused, group=True).results()[1]
    assert "temperature is a single number" in found["number"]
    assert "weight is on the meta device" in found["meta"]
    assert "leaves the last of 2 processes no weight" in found["fp16"]
    assert "is sharded already" in found["twice"]
    assert "Adafactor is none of them" in found["optimizer"]
    assert found["stepped"].startswith("ValueError: the optimizer has a state")
    assert len(found) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_trains_on_a_gpu_from_a_model_on_the_cpu() -> None:
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        model, device = make_model(), torch.device("cuda", torch.cuda.current_device())
        ranks = Ranks(0, 1, None)
        shard_model(model, ranks, device, unit_bytes=500)
        optimizer = make_optimizer("sgd", model)
        shards = Shards(model, ranks, max_norm=0.5)
        shards.adopt(optimizer)
        amp = AmpStep(optimizer, halt=True)
        for x, y in batches():
            amp.backward(cross_entropy(model(x.to(device)), y.to(device)))
            shards.after_backward()
            amp.step(watch=[shards.norm])
        found = {name: tensor.cpu() for name, tensor in whole(model).items()}
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(found, expected("sgd", 0.5)[0], rtol=1e-4, atol=1e-5)
