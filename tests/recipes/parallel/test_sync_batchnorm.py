"""Against one BatchNorm of torch, in float64, over the batches of all ranks put together."""

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
import torchvision
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from flambeau.recipes.parallel import sync_batchnorm
from flambeau.recipes.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
)

StartRanks = Callable[..., Any]
CLASSES = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def a_batch(*shape: int, mean: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs, every channel of another mean and width, and a gradient of the output that goes with them."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.arange(1.0, shape[1] + 1).view(-1, *[1] * (len(shape) - 2))
    noise = torch.randn(shape, generator=generator)
    return mean + wide * (1 + noise), noise + torch.randn(shape, generator=generator)


def share(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return x.split(list(sizes))[dist.get_rank()]


def a_layer(dim: int, **settings: Any) -> Any:
    """With weights that are not 1 and 0, and running statistics that are not 0 and 1."""
    layer = CLASSES[dim](3, **settings)
    with torch.no_grad():
        for value, tensor in enumerate([*layer.parameters(), *layer.buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(torch.tensor([0.5, 1.0, 2.0]) + value)
    return layer


def train(layer: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Forward and backward of each batch; the last one's results, gradients summed over batches."""
    for values, dy in batches:
        x = values.detach().requires_grad_()
        y = layer(x)
        y.backward(dy)
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad}
    found |= {f"d{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return found | {name: buffer.clone() for name, buffer in layer.named_buffers()}


def check(
    ranks: Sequence[dict[str, Tensor]], whole: dict[str, Tensor], *, rtol: float, atol: float
) -> None:
    """What the ranks found is what one layer found over everything."""
    for name, expected in whole.items():
        values = [found[name] for found in ranks]
        if name in ("y", "dx"):
            assert values[0].dtype == torch.float32
            value = torch.cat(values)
        elif name.startswith("d"):
            value = torch.stack(values).sum(0)  # DDP would average them
        else:
            assert all(torch.equal(v, values[0]) for v in values), f"{name} differs between ranks"
            value = values[0]
        torch.testing.assert_close(
            value.double(),
            expected.double(),
            rtol=rtol,
            atol=atol,
            msg=lambda m, n=name: f"{n}: {m}",
        )


CASES: dict[str, tuple[tuple[int, ...], float, dict[str, Any]]] = {
    "NC": ((8, 3), 0.0, {}),
    "NCL": ((8, 3, 5), 0.0, {}),
    "NCHW": ((8, 3, 4, 5), 0.0, {}),
    "NCDHW": ((8, 3, 2, 2, 3), 0.0, {}),
    "far from zero": ((8, 3, 16, 16), 1e4, {}),
    "momentum=None": ((8, 3, 2, 2), 0.0, {"momentum": None}),
    "affine=False": ((8, 3, 2, 2), 0.0, {"affine": False}),
    "track_running_stats=False": ((8, 3, 2, 2), 0.0, {"track_running_stats": False}),
}


@pytest.mark.parametrize("sizes", [(5, 3), (5, 2, 1), (0, 3, 1, 4)], ids=str)
def test_equals_batchnorm_over_the_whole_batch(
    start_ranks: StartRanks, sizes: tuple[int, ...]
) -> None:
    def batches(case: str) -> list[tuple[Tensor, Tensor]]:
        shape, mean, _ = CASES[case]
        return [a_batch(*shape, mean=mean, seed=seed) for seed in range(3)]

    def work() -> dict[str, dict[str, Tensor]]:
        found = {}
        for case, (shape, _, settings) in CASES.items():
            layer = convert_sync_batchnorm(a_layer(len(shape), **settings))
            mine = [(share(x, sizes), share(dy, sizes)) for x, dy in batches(case)]
            found[case] = train(layer, mine)
        return found

    ranks = start_ranks(len(sizes), work, group=True).results()
    for case, (shape, _, settings) in CASES.items():
        layer = a_layer(len(shape), **settings).double()
        whole = train(layer, [(x.double(), dy.double()) for x, dy in batches(case)])
        # 1e4 and 1 in one float32: what a BatchNorm of float32 is wrong by is a hundred times more.
        check([found[case] for found in ranks], whole, rtol=2e-5, atol=2e-5)


def test_memory_format_dtypes_and_autocast(start_ranks: StartRanks) -> None:
    sizes = (5, 2)
    x, dy = a_batch(7, 3, 4, 4)

    def work() -> dict[str, Any]:
        mine, their_dy = share(x, sizes), share(dy, sizes)
        found: dict[str, Any] = {}
        last = mine.to(memory_format=torch.channels_last)
        found["channels_last"] = train(
            convert_sync_batchnorm(a_layer(4)), [(last, their_dy), (last, their_dy)]
        )
        for name in ("y", "dx"):
            result = found["channels_last"][name]
            assert result.is_contiguous(memory_format=torch.channels_last)
            assert not result.is_contiguous()
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            half = train(convert_sync_batchnorm(a_layer(4)), [(mine.to(dtype), their_dy.to(dtype))])
            assert half["y"].dtype == half["dx"].dtype == dtype
            assert half["running_var"].dtype == half["dweight"].dtype == torch.float32
            found[str(dtype)] = {name: value.float() for name, value in half.items()}
        all_half = convert_sync_batchnorm(a_layer(4).bfloat16())
        found["all"] = train(all_half, [(mine.bfloat16(), their_dy.bfloat16())])
        assert {v.dtype for n, v in found["all"].items() if n != "num_batches_tracked"} == {
            torch.bfloat16
        }
        model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 3, 1), a_layer(4)))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert model(mine).dtype == torch.bfloat16
        # an expanded gradient, a transposed input
        layer, turned = convert_sync_batchnorm(a_layer(3)), mine[:, :, 0].transpose(0, 2)[:, :3]
        odd = turned.detach().requires_grad_()
        layer(odd).sum().backward()
        torch.testing.assert_close(odd.grad, torch.zeros_like(odd), rtol=0, atol=1e-5)
        return found

    ranks = start_ranks(2, work, group=True).results()
    for name in ("channels_last", "torch.float64"):
        batches = [(x.double(), dy.double())] * (2 if name == "channels_last" else 1)
        check(
            [found[name] for found in ranks],
            train(a_layer(4).double(), batches),
            rtol=1e-5,
            atol=1e-5,
        )
    for name, dtype, accuracy in (
        ("torch.bfloat16", torch.bfloat16, 2**-8),
        ("torch.float16", torch.float16, 2**-11),
    ):
        rounded = [(x.to(dtype).double(), dy.to(dtype).double())]
        whole = train(a_layer(4).double(), rounded)
        # One rounding of the result; the statistics and the weights' gradients are float32's.
        check([found[name] for found in ranks], whole, rtol=accuracy, atol=accuracy * 4)
        for key in ("running_mean", "running_var"):
            torch.testing.assert_close(
                ranks[0][name][key].double(), whole[key], rtol=1e-5, atol=1e-5
            )


def test_a_batch_that_does_not_count(start_ranks: StartRanks) -> None:
    sizes, counted = (3, 2, 2), (True, False, True)
    x, dy = a_batch(7, 3, 4, 4)
    stand_in = slice(3, 5)
    x[stand_in] = 1e6  # would be seen everywhere

    def work() -> dict[str, Tensor]:
        layer: Any = convert_sync_batchnorm(a_layer(4))
        layer.counted = counted[dist.get_rank()]
        found = train(layer, [(share(x, sizes), share(dy, sizes))])
        layer.counted = None
        found["none"] = layer(share(x, sizes)).detach()
        return found

    ranks = start_ranks(3, work, group=True).results()
    kept = [index for index in range(7) if index not in range(3, 5)]
    layer = a_layer(4).double()
    check(ranks[::2], train(layer, [(x[kept].double(), dy[kept].double())]), rtol=1e-5, atol=1e-5)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(ranks[1][name], ranks[0][name])
    # The stand-in goes through the others' statistics as through constants.
    var, mean = torch.var_mean(x[kept].double(), (0, 2, 3), correction=0)
    lone = x[stand_in].double().requires_grad_()
    y = batch_norm(lone, mean, var, layer.weight.detach(), layer.bias.detach(), eps=layer.eps)
    y.backward(dy[stand_in].double())
    torch.testing.assert_close(ranks[1]["y"].double(), y.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ranks[1]["dx"].double(), lone.grad, rtol=1e-5, atol=1e-5)
    whole = a_layer(4).double()(x.double())
    torch.testing.assert_close(
        torch.cat([found["none"] for found in ranks]).double(), whole.detach(), rtol=1e-5, atol=1e-4
    )


def test_layers_with_more_in_them_under_ddp(start_ranks: StartRanks) -> None:
    """timm's BatchNormAct2d in a network of its own, an optimizer from before, steps of unequal shares."""
    sizes, steps = (5, 2), 3
    torch.manual_seed(0)
    made = timm.create_model("test_efficientnet", num_classes=5, drop_rate=0.0).double()
    images = torch.randn(steps, 7, 3, 32, 32, dtype=torch.float64)
    targets = torch.randint(0, 5, (steps, 7))
    assert any(isinstance(module, BatchNormAct2d) for module in made.modules())

    def fit(*, ranks: bool) -> dict[str, Tensor]:
        model = copy.deepcopy(made)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        world = dist.get_world_size() if ranks else 1
        network: nn.Module = model
        if ranks:
            assert convert_sync_batchnorm(model) is model
            network = DistributedDataParallel(model)
        for batch in zip(images, targets, strict=True):
            x, y = (share(values, sizes) if ranks else values for values in batch)
            optimizer.zero_grad()
            # DDP divides the sum by the number of ranks
            loss = nn.functional.cross_entropy(network(x), y, reduction="sum") * world / 7
            loss.backward()
            optimizer.step()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    ranks = start_ranks(2, lambda: fit(ranks=True), group=True).results()
    whole = fit(ranks=False)
    assert list(whole) == list(ranks[0])
    for name, expected in whole.items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        torch.testing.assert_close(ranks[0][name], expected, rtol=1e-8, atol=1e-8)
    moved = [torch.dist(whole[name], start) for name, start in made.named_parameters()]
    assert min(moved) > 0


class Scalars(TorchDispatchMode):
    """Refuses whatever reads a value of a tensor on the host, or has a shape that depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func), func
        return func(*args, **(kwargs or {}))


def test_one_collective_each_way_and_no_wait(start_ranks: StartRanks) -> None:
    x, dy = a_batch(6, 3, 4, 4)

    def work() -> tuple[list[str], ...]:
        calls: list[str] = []

        def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def count(*args: Any, **settings: Any) -> Any:
                calls.append(name)
                return real(*args, **settings)

            return count

        for name in ("all_gather", "all_reduce"):
            setattr(dist, name, counted(name, getattr(dist, name)))
        layer: Any = convert_sync_batchnorm(a_layer(4))
        inputs = share(x, (4, 2)).requires_grad_()
        with Scalars():
            y = layer(inputs)
            forward = calls.copy()
            y.backward(share(dy, (4, 2)))
            both = calls.copy()
            layer(inputs.detach()).sum().backward()  # the first layer of a network
        layer.eval()
        layer(inputs)
        return forward, both, calls

    for forward, both, calls in start_ranks(2, work, group=True).results():
        assert forward == ["all_gather"]
        assert both == ["all_gather", "all_reduce"]
        assert calls == ["all_gather", "all_reduce", "all_gather"]


def test_groups(start_ranks: StartRanks) -> None:
    x, dy = a_batch(7, 3, 4, 4)

    def work() -> Any:
        pair, single = dist.new_group([0, 1]), dist.new_group([2])
        alone = dist.get_rank() == 2
        layer: Any = convert_sync_batchnorm(a_layer(4), single if alone else pair)
        twin = copy.deepcopy(layer)  # as an average of weights does
        assert twin.process_group is layer.process_group
        assert twin.weight is not layer.weight
        found = train(layer, [(share(x, (3, 2, 2)), share(dy, (3, 2, 2)))])
        with pytest.raises(TypeError, match="ProcessGroup"):
            pickle.dumps(twin)
        if alone:
            twin.process_group = pair
            with pytest.raises(ValueError, match="not in process_group"):
                twin(x)
        dist.barrier()  # nobody ends while another still connects
        return found

    ranks = start_ranks(3, work, group=True).results()
    check(
        ranks[:2],
        train(a_layer(4).double(), [(x[:5].double(), dy[:5].double())]),
        rtol=1e-5,
        atol=1e-5,
    )
    plain = train(a_layer(4), [(x[5:], dy[5:])])
    assert all(torch.equal(ranks[2][name], plain[name]) for name in plain)


class Frozen(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class FromScratch(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((0, 2, 3), keepdim=True)


def test_edges_and_refusals_in_a_group(start_ranks: StartRanks) -> None:
    def work() -> None:
        rank = dist.get_rank()
        layer: Any = convert_sync_batchnorm(a_layer(4))
        for bad in (torch.ones(2, 4, 5, 5), torch.ones(2, 3, 5, 5, dtype=torch.long)):
            with pytest.raises(
                ValueError, match=r"expected a floating input \(N, 3, ...\), got torch"
            ):
                layer(bad)
        with pytest.raises(ValueError, match="expected 4D input"):  # BatchNorm2d's own rule
            layer(torch.ones(2, 3))
        with pytest.raises(
            ValueError, match=r"expected an input \(N, C, ...\), got the shape \(3,\)"
        ):
            SyncBatchNorm(3)(torch.ones(3))
        with pytest.raises(TypeError, match=r"FromScratch.* does not call .*batch_norm"):
            convert_sync_batchnorm(FromScratch(3))(torch.ones(2, 3, 1, 1))
        x = torch.randn(2, 3, 4, 4, requires_grad=True)
        assert torch.equal(convert_sync_batchnorm(Frozen(3))(x), Frozen(3)(x))
        assert torch.equal(layer.eval()(x), a_layer(4).eval()(x))
        layer.train()
        (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()
        # one value in all, and none at all: no variance, and nothing to learn from
        before = {n: b.clone() for n, b in layer.named_buffers() if n != "num_batches_tracked"}
        y = layer(torch.full((1 - rank, 3, 1, 1), 7.0))
        torch.testing.assert_close(y, layer.bias.view(1, 3, 1, 1).expand_as(y), rtol=0, atol=1e-5)
        assert layer(torch.ones(0, 3, 2, 2)).shape == (0, 3, 2, 2)
        assert all(torch.equal(b, dict(layer.named_buffers())[n]) for n, b in before.items())

    start_ranks(2, work, group=True).results()


def test_alone_it_is_batchnorm_to_the_bit(start_ranks: StartRanks) -> None:
    def compare() -> None:
        for dim, shape in ((2, (6, 3)), (3, (6, 3, 4)), (4, (6, 3, 4, 5)), (5, (6, 3, 2, 3, 4))):
            batches = [a_batch(*shape, seed=seed) for seed in range(2)]
            mine, plain = convert_sync_batchnorm(a_layer(dim)), a_layer(dim)
            found, expected = train(mine, batches), train(plain, batches)
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert torch.equal(mine.eval()(batches[0][0]), plain.eval()(batches[0][0]))

    compare()  # no group
    built = SyncBatchNorm(3, eps=1e-3, momentum=0.2, dtype=torch.float64)
    x = a_batch(6, 3, 4, 5)[0].double()
    plain = nn.BatchNorm2d(3, eps=1e-3, momentum=0.2, dtype=torch.float64)
    assert torch.equal(built(x), plain(x))
    assert torch.equal(built.running_var, plain.running_var)

    def work() -> None:
        compare()
        built.counted = False
        with pytest.raises(ValueError, match="counted is False, and no other rank"):
            built(x)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            convert_sync_batchnorm(a_layer(4))(torch.ones(1, 3, 1, 1))

    start_ranks(1, work, group=True).results()


# ---------------------------------------------------------------- conversion


@pytest.mark.parametrize(
    "make",
    [
        lambda: torchvision.models.resnet18(num_classes=3),
        lambda: timm.create_model("test_efficientnet", num_classes=3),
    ],
    ids=["torchvision", "timm"],
)
def test_conversion_there_and_back(make: Callable[[], nn.Module]) -> None:
    model = make()
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    classes = [type(layer) for layer in layers]
    layers[0].eval().requires_grad_(False)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = list(model.parameters())
    modes = [module.training for module in model.modules()]
    x = torch.randn(2, 3, 32, 32)
    expected = copy.deepcopy(model).eval()(x)

    assert convert_sync_batchnorm(convert_sync_batchnorm(model)) is model
    assert all(isinstance(layer, SyncBatchNorm) for layer in layers)
    assert all(isinstance(layer, kind) for layer, kind in zip(layers, classes, strict=True))
    assert all(layer.process_group is None and layer.counted is None for layer in layers)
    same_parts(model, state, parameters, modes)
    assert torch.equal(copy.deepcopy(model).eval()(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model)).eval()(x), expected)

    assert revert_sync_batchnorm(revert_sync_batchnorm(model)) is model
    assert [type(layer) for layer in layers] == classes
    assert not {"process_group", "counted"} & layers[0].__dict__.keys()
    same_parts(model, state, parameters, modes)
    assert torch.equal(model.eval()(x), expected)


def same_parts(
    model: nn.Module, state: dict[str, Tensor], parameters: list[nn.Parameter], modes: list[bool]
) -> None:
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert [module.training for module in model.modules()] == modes


def test_conversion_keeps_a_layer_itself() -> None:
    """The root, one shared by two places, its hooks, and what is None in it."""
    layer = nn.BatchNorm1d(3, momentum=None, affine=False, track_running_stats=False)
    met = []
    layer.register_forward_hook(lambda *_: met.append(1))
    root: Any = convert_sync_batchnorm(layer.eval())
    assert root is layer
    assert (root.momentum, root.weight, root.running_mean, root.training) == (
        None,
        None,
        None,
        False,
    )
    assert repr(root).startswith("SyncBatchNorm1d(3, ")
    root(torch.ones(2, 3))
    assert met == [1]
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})
    assert convert_sync_batchnorm(model)["a"] is model["b"][0]
    assert type(revert_sync_batchnorm(layer)) is nn.BatchNorm1d
    without = nn.Linear(2, 2)
    assert convert_sync_batchnorm(without) is without
    assert revert_sync_batchnorm(without) is without


def test_conversion_keeps_what_was_put_on_a_layer() -> None:
    layer = nn.BatchNorm2d(3)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    x = torch.randn(4, 3, 2, 2)
    expected = copy.deepcopy(layer)(x)
    assert torch.equal(convert_sync_batchnorm(layer)(x), expected)
    revert_sync_batchnorm(layer)
    assert nn.utils.parametrize.is_parametrized(layer, "weight")


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (nn.SyncBatchNorm(3), TypeError, "1 is a torch.nn.SyncBatchNorm already"),
        (nn.LazyBatchNorm2d(), ValueError, "1 is lazy: pass a batch"),
    ],
)
def test_what_cannot_be_converted(bad: nn.Module, error: type[Exception], message: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), bad)
    with pytest.raises(error, match=message):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d


def test_what_cannot_be_reverted() -> None:
    model = nn.Sequential(convert_sync_batchnorm(nn.BatchNorm2d(3)), SyncBatchNorm(3))
    with pytest.raises(TypeError, match="1 was built as SyncBatchNorm"):
        revert_sync_batchnorm(model)
    assert isinstance(model[0], SyncBatchNorm)


def test_an_initialised_lazy_layer_is_converted() -> None:
    layer: Any = nn.LazyBatchNorm2d()
    layer(torch.randn(2, 3, 2, 2))
    assert isinstance(convert_sync_batchnorm(layer), SyncBatchNorm)


# ---------------------------------------------------------------- CUDA


def test_hands_cuda_tensors_to_torch(start_ranks: StartRanks) -> None:
    """Without a GPU: what torch's function would have been given, by the names of its parameters."""

    def work() -> None:
        names = list(inspect.signature(sync_batchnorm.TorchFunction.forward).parameters)[1:]
        given: list[dict[str, Any]] = []

        class Recorder:
            @staticmethod
            def apply(*args: Any) -> Tensor:
                given.append(dict(zip(names, args, strict=True)))
                return args[0] + 0

        layer: Any = convert_sync_batchnorm(a_layer(4, eps=1e-3, momentum=0.3))
        sync_batchnorm.TorchFunction = Recorder  # type: ignore[assignment,misc]
        torch.Tensor.is_cuda = True  # type: ignore[misc,assignment,method-assign]
        x = torch.randn(2, 3, 2, 2, dtype=torch.float16)
        assert torch.equal(layer(x), x)
        assert layer(x[:0]).dtype == torch.float16
        layer.counted = True
        assert not torch.equal(layer(x), x)
        assert [len(given), given[0]["input"] is x, given[1]["input"].dtype] == [
            2,
            True,
            torch.float32,
        ]
        for name in ("weight", "bias", "running_mean", "running_var"):
            assert given[0][name] is getattr(layer, name)
        group = dist.group.WORLD
        assert [given[0][name] for name in names[5:]] == [1e-3, 0.3, group, 2]
        assert names[5:] == ["eps", "momentum", "process_group", "world_size"]

    start_ranks(2, work, group=True).results()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda(tmp_path: Path) -> None:
    """This file as a program on two ranks that share a GPU by gloo, new processes: CUDA outlives no fork."""
    store = tmp_path / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", __file__, str(store), str(rank)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)


def cuda_rank(store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    used: list[str] = []
    real = torch.nn.modules._functions.SyncBatchNorm.forward

    def spied(*args: Any) -> Any:
        used.append("torch's")
        return real(*args)

    torch.nn.modules._functions.SyncBatchNorm.forward = spied  # type: ignore[method-assign]
    for sizes in ((5, 2), (7, 0)):
        for counted in (None, True):
            for dtype in (torch.float32, torch.float16):
                x, dy = (t.to("cuda", dtype) for t in a_batch(7, 3, 8, 8))
                layer: Any = convert_sync_batchnorm(a_layer(4).cuda())
                layer.counted = counted
                found = train(layer, [(share(x, sizes), share(dy, sizes))])
                assert (used != []) == (counted is None)
                used.clear()
                assert found["y"].dtype == found["dx"].dtype == dtype
                assert {"dweight", "dbias"} <= set(found)
                whole = train(a_layer(4).double().cuda(), [(x.double(), dy.double())])
                accuracy = 1e-4 if dtype == torch.float32 else 4e-3
                for name in ("y", "dx"):
                    torch.testing.assert_close(
                        found[name].double(),
                        share(whole[name], sizes),
                        rtol=accuracy,
                        atol=accuracy,
                    )
                for name in ("running_mean", "running_var"):
                    torch.testing.assert_close(
                        found[name].double(), whole[name], rtol=1e-4, atol=1e-4
                    )
    dist.destroy_process_group()


if __name__ == "__main__":
    cuda_rank(sys.argv[1], int(sys.argv[2]))
