import copy
import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flambeau.recipes.parallel.model_parallel import ModelParallel, balanced_split


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        relu = nn.ReLU()  # one layer in two places
        layers = [
            nn.Linear(6, 16),
            relu,
            nn.Linear(16, 16),
            relu,
            nn.LayerNorm(16),
            nn.Linear(16, 3),
        ]
        return nn.Sequential(*layers).double()


def samples(num: int) -> Tensor:
    return torch.randn(num, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def answers(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().mean().backward()
    assert x.grad is not None
    return out.detach(), x.grad, {name: p.grad for name, p in model.named_parameters()}


# ---------------------------------------------------------------- the split


def test_split_is_the_best_of_all() -> None:
    generator = random.Random(0)
    for _ in range(200):
        sizes = [generator.choice([0, 1, 2, 5, 9, 30]) for _ in range(generator.randint(1, 8))]
        for num_stages in range(1, len(sizes) + 1):
            counts = balanced_split(sizes, num_stages)
            assert len(counts) == num_stages
            assert min(counts) >= 1
            assert sum(counts) == len(sizes)
            assert largest(sizes, counts) == min(
                largest(sizes, [b - a for a, b in itertools.pairwise([0, *cuts, len(sizes)])])
                for cuts in itertools.combinations(range(1, len(sizes)), num_stages - 1)
            )


def largest(sizes: list[int], counts: list[int]) -> int:
    row = iter(sizes)
    return max(sum(itertools.islice(row, count)) for count in counts)


@pytest.mark.parametrize("num_stages", [0, 4, -1])
def test_split_refuses(num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"3 layers cannot be cut into {num_stages} stages"):
        balanced_split([1, 2, 3], num_stages)


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize("micro_batch_size", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("num_devices", [1, 2, 6])
def test_equals_the_model_in_one_piece(num_devices: int, micro_batch_size: int | None) -> None:
    expected = answers(network(), samples(7))
    model = ModelParallel(network(), ["cpu"] * num_devices, micro_batch_size=micro_batch_size)
    torch.testing.assert_close(answers(model, samples(7)), expected, rtol=1e-12, atol=1e-14)


def test_parts_of_the_batch_go_one_by_one() -> None:
    rows: list[int] = []
    model = ModelParallel(network(), ["cpu", "cpu"], micro_batch_size=3)
    model.get_submodule("2").register_forward_hook(lambda layer, args, out: rows.append(len(out)))
    model(samples(7))
    assert rows == [3, 3, 1]


def test_layers_lie_where_they_should() -> None:
    """On the meta device a tensor has a place and a shape, and no values."""
    model = ModelParallel(network(), ["cpu", "meta"], micro_batch_size=2)
    assert [device.type for device in model.devices] == ["cpu"] * 2 + ["meta"] * 4
    places = {name: parameter.device.type for name, parameter in model.named_parameters()}
    assert {places["0.weight"], places["0.bias"]} == {"cpu"}
    assert {places["2.weight"], places["4.bias"], places["5.weight"]} == {"meta"}
    out = model(samples(5))
    assert (out.device.type, out.shape) == ("meta", (5, 3))

    model = ModelParallel(network(), ["meta", "cpu", "meta"], layers_per_device=[1, 1, 4])
    assert [device.type for device in model.devices] == ["meta", "cpu"] + ["meta"] * 4


def test_bytes_are_balanced_with_buffers() -> None:
    # 16*16*8 + 16*8 bytes of Linear, 16*(2*8 + 2*8) + 8 of BatchNorm.
    layers = [nn.BatchNorm1d(16), nn.BatchNorm1d(16), nn.BatchNorm1d(16), nn.BatchNorm1d(16)]
    model = nn.Sequential(*layers, nn.Linear(16, 16)).double()
    assert [len(list(group)) for _, group in itertools.groupby(
        ModelParallel(model, ["cpu", "meta"]).devices, key=str
    )] == [4, 1]  # fmt: skip


def test_checkpoints_fit_both_ways() -> None:
    plain = network()
    split = ModelParallel(network(), ["cpu", "cpu"])
    for parameter in split.parameters():
        nn.init.normal_(parameter)
    assert list(split.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(split.state_dict())
    torch.testing.assert_close(plain(samples(4)), split(samples(4)), rtol=1e-12, atol=1e-14)
    split.load_state_dict(network().state_dict())
    torch.testing.assert_close(network()(samples(4)), split(samples(4)), rtol=1e-12, atol=1e-14)


def test_modes_stay() -> None:
    model = network().eval()
    assert not ModelParallel(model, ["cpu"]).training
    model = network()
    model[4].eval()
    split = ModelParallel(model, ["cpu"])
    assert split.training
    assert not split.get_submodule("4").training


def test_trains_beside_ddp(start_ranks) -> None:
    """Two ranks, each with the model on two devices: the gradient is that of both halves of the batch."""
    expected = answers(network(), samples(8))[2]

    def rank() -> dict[str, Tensor]:
        model = DistributedDataParallel(
            ModelParallel(network(), ["cpu", "cpu"], micro_batch_size=2)
        )
        model(samples(8).chunk(2)[dist.get_rank()]).square().mean().backward()
        return {name: p.grad for name, p in model.module.named_parameters()}

    for gradients in start_ranks(2, rank, group=True).results():
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------- what is refused


class Custom(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Custom(nn.Linear(2, 2))])
def test_other_models_are_refused(model: nn.Module) -> None:
    with pytest.raises(TypeError, match=f"must be an nn.Sequential, got {type(model).__name__}"):
        ModelParallel(model, ["cpu"])


@pytest.mark.parametrize("counts", [[6], [3, 2], [0, 6], [2, 2, 2], []])
def test_layers_per_device_must_fit(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="2 numbers of at least 1 that add up to the 6 layers"):
        ModelParallel(network(), ["cpu", "cpu"], layers_per_device=counts)


def test_too_many_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="6 layers cannot be cut into 7 stages"):
        ModelParallel(network(), ["cpu"] * 7)


def test_micro_batch_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="micro_batch_size must be at least 1, got 0"):
        ModelParallel(network(), ["cpu"], micro_batch_size=0)


def test_a_parameter_of_two_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"layers '0' on cpu and '2' on meta share a tensor of shape \(4, 4\)"
    ):
        ModelParallel(model, ["cpu", "meta"], layers_per_device=[2, 1])
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)  # nothing was moved
    both = ModelParallel(
        nn.Sequential(*model, nn.Linear(4, 1)), ["cpu", "meta"], layers_per_device=[3, 1]
    )
    assert both.get_submodule("2").weight is both.get_submodule("0").weight


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cpu_and_cuda() -> None:
    expected = answers(network(), samples(7))
    model = ModelParallel(network(), ["cpu", "cuda"], micro_batch_size=2)
    out, x_grad, gradients = answers(model, samples(7))
    assert out.device.type == "cuda"
    assert gradients["5.weight"].device.type == "cuda"
    on_cpu = out.cpu(), x_grad, {name: gradient.cpu() for name, gradient in gradients.items()}
    torch.testing.assert_close(on_cpu, expected, rtol=1e-10, atol=1e-12)
