import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import SGD, AdamW

from flambeau.recipes.training.muon import Muon, hidden_matrices, orthogonalized

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
SHAPES = [(12, 20), (20, 12), (12, 20), (7, 7)]


def parameters(shapes: list[tuple[int, ...]], seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def train(optimizer: Any, seed: int, *, steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        optimizer.step()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 6, (1, 3)), nn.Flatten(), nn.Linear(6, 5), nn.Linear(5, 2),
    )  # fmt: skip


# ---------------------------------------------------------------- Newton and Schulz


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 9)])
def test_singular_vectors_are_those_of_svd(shape: tuple[int, int]) -> None:
    """U S' V^T with the U and V of the matrix, and S' near 1 where its singular values are not tiny."""
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    rotated = u.mT @ orthogonalized(x) @ vh.mT
    values = rotated.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(rotated, torch.diag_embed(values), rtol=0, atol=2e-4)
    large = values[s > 0.1 * s.amax(dim=-1, keepdim=True)]
    assert 0.65 < large.min() <= large.max() < 1.25
    assert values.max() < 1.25


def test_one_step_is_the_polynomial_of_the_source() -> None:
    x = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = x[0] / x[0].norm()
    gram = y @ y.T
    wanted = 3.4445 * y - 4.7750 * gram @ y + 2.0315 * gram @ gram @ y
    torch.testing.assert_close(orthogonalized(x, steps=1, dtype=torch.float64)[0], wanted)


def test_of_a_low_rank_and_of_nothing() -> None:
    torch.testing.assert_close(orthogonalized(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5))
    rank_one = torch.outer(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0, 0.0]))
    found = orthogonalized(rank_one[None])[0]
    torch.testing.assert_close(found / found.norm(), rank_one / rank_one.norm())
    assert 0.65 < found.norm() < 1.25


def test_dtypes_and_devices_follow() -> None:
    assert orthogonalized(torch.zeros(1, 2, 3, device="meta")).dtype is torch.bfloat16
    assert orthogonalized(torch.randn(1, 2, 3, dtype=torch.float64)).dtype is torch.float32
    x = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(3))
    half = orthogonalized(x, dtype=torch.bfloat16)
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.float(), orthogonalized(x), rtol=0, atol=0.1)


# ---------------------------------------------------------------- both halves


@pytest.mark.parametrize("momentum", [0.0, 0.95])
def test_matrices_equal_torchs_muon(momentum: float) -> None:
    mine, theirs = parameters(SHAPES), parameters(SHAPES)
    train(
        Muon(
            mine, matrices=mine, lr=0.02, weight_decay=0.1, momentum=momentum,
            ns_dtype=torch.bfloat16,
        ),
        1,
    )  # fmt: skip
    train(
        torch.optim.Muon(
            theirs, lr=0.02, weight_decay=0.1, momentum=momentum, adjust_lr_fn="match_rms_adamw"
        ),
        1,
    )
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_convolutions_are_matrices_of_filters() -> None:
    shape = (6, 4, 3, 3)
    (conv,), (flat,) = parameters([shape]), parameters([shape])
    conv.data = conv.data.contiguous(memory_format=torch.channels_last)
    flat.data = flat.data.flatten(1)
    for p in (conv, flat):
        train_conv(p)
    torch.testing.assert_close(conv.flatten(1), flat)


def train_conv(parameter: Parameter) -> None:
    optimizer = Muon([parameter], matrices=[parameter], lr=0.1)
    for seed in range(4):
        gradient = torch.randn((6, 4, 3, 3), generator=torch.Generator().manual_seed(seed))
        parameter.grad = gradient.view(parameter.shape).contiguous()
        if parameter.dim() == 4:
            parameter.grad = parameter.grad.contiguous(memory_format=torch.channels_last)
        optimizer.step()


def test_the_rest_equals_adamw() -> None:
    shapes: list[tuple[int, ...]] = [(6, 2), (5,), (3, 4), ()]
    mine, theirs = parameters(shapes), parameters(shapes)
    settings: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = Muon(mine, matrices=mine[:1], **settings)
    train(optimizer, 2)
    train(AdamW(theirs, **settings), 2)
    for a, b in zip(mine[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(mine[0], theirs[0], atol=1e-2)


def test_the_rest_equals_sgd() -> None:
    shapes: list[tuple[int, ...]] = [(6, 2), (5,), (3, 4), ()]
    mine, theirs = parameters(shapes), parameters(shapes)
    settings: dict[str, Any] = {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1}
    group = {"params": mine, "others": "sgd", **settings}
    train(Muon([group], matrices=mine[:1]), 2)
    train(SGD(theirs, nesterov=True, **settings), 2)
    for a, b in zip(mine[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_an_update_has_the_size_of_adamws() -> None:
    """arXiv 2502.16982, section 2.2: a root mean square of about 0.2 of the rate, whatever the shape."""
    for shape in [(64, 64), (16, 256), (256, 16), (8, 4, 3, 3)]:
        (p,) = parameters([shape])
        before = p.detach().clone()
        train(Muon([p], matrices=[p], lr=1.0, weight_decay=0.0), 0, steps=1)
        size = float((p - before).detach().square().mean().sqrt())
        # The norm of U V^T is sqrt(min), so all of it is 0.2 but for singular values of 0.7 to 1.2.
        assert size == pytest.approx(0.2, rel=0.25)


def test_with_a_fixed_norm_each_matrix_is_rescaled_before_its_update() -> None:
    """As in Jordan's airbench94_muon: to the norm of orthonormal rows, without decay, and by `lr` of it."""
    shapes: list[tuple[int, ...]] = [(6, 4, 3, 3), (7, 3)]
    mine, theirs = parameters([*shapes, (5, 5)]), parameters(shapes)
    with torch.no_grad():
        mine[2].zero_()
        for p, norm in zip(theirs, (6**0.5, 3**0.5), strict=True):
            p.mul_(norm / p.norm())
    starts = [p.detach().clone() for p in theirs]
    train(Muon(mine, matrices=mine, lr=0.1, fixed_norm=True, weight_decay=9.0), 0, steps=1)
    train(Muon(theirs, matrices=theirs, lr=0.1, weight_decay=0.0), 0, steps=1)
    assert bool(mine[2].isfinite().all())
    for p, q, start, longer_side in zip(mine, theirs, starts, (36, 7), strict=False):
        torch.testing.assert_close((p - start) * 0.2 * longer_side**0.5, q - start)
        assert 0.06 < float((p.detach() - start).norm() / start.norm()) < 0.13


def test_a_rate_on_the_device_is_the_rate() -> None:
    shapes: list[tuple[int, ...]] = [(6, 2), (5,), (3, 4)]
    mine, theirs = parameters(shapes), parameters(shapes)
    number = Muon(mine, matrices=mine[:1], lr=0.02)
    tensor = Muon(theirs, matrices=theirs[:1], lr=0.02)
    for group in tensor.param_groups:
        group["lr"] = torch.tensor(0.02)
    train(number, 0)
    train(tensor, 0)
    torch.testing.assert_close(mine, theirs)


def test_groups_keep_their_settings_and_are_split() -> None:
    a, b, c, d = parameters([(4, 4), (4,), (4, 4), (4,)])
    groups = [{"params": iter([a, b]), "lr": 0.5}, {"params": [c, d], "weight_decay": 0.0}]
    optimizer = Muon(groups, matrices=[a, c], lr=0.1, weight_decay=0.2)
    found = [
        (group["muon"], group["lr"], group["weight_decay"], len(group["params"]))
        for group in optimizer.param_groups
    ]
    assert found == [
        (True, 0.5, 0.2, 1),
        (False, 0.5, 0.2, 1),
        (True, 0.1, 0.0, 1),
        (False, 0.1, 0.0, 1),
    ]
    before = [p.detach().clone() for p in (a, c)]
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, 0, steps=1)
    assert torch.equal(a, before[0])
    assert not torch.equal(c, before[1])


def test_a_parameter_without_a_gradient_stays() -> None:
    a, b, c = parameters([(4, 4), (4, 4), (4,)])
    optimizer = Muon([a, b, c], matrices=[a, b])
    before = [p.detach().clone() for p in (b, c)]
    a.grad = torch.ones(4, 4)
    optimizer.step()
    assert torch.equal(b, before[0])
    assert torch.equal(c, before[1])
    assert len(optimizer.state) == 1


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_resume_is_exact(stop: int) -> None:
    def make() -> tuple[list[Parameter], Muon]:
        mine = parameters([*SHAPES, (5,)])
        return mine, Muon(mine, matrices=mine[:4], lr=0.05)

    def go(optimizer: Muon, steps: range) -> None:
        for step in steps:
            train(optimizer, step, steps=1)

    whole, optimizer = make()
    go(optimizer, range(6))
    mine, first = make()
    go(first, range(stop))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    again, second = make()
    for new, old in zip(again, mine, strict=True):
        new.data.copy_(old.data)
    second.load_state_dict(torch.load(file, weights_only=True))
    go(second, range(stop, 6))
    for a, b in zip(again, whole, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_does_the_same_step(copied: Callable[[Any], Any]) -> None:
    mine = parameters([(4, 4), (4,)])
    optimizer = Muon(mine, matrices=mine[:1], ns_dtype=torch.float64)
    other = copied(optimizer)
    for it in (optimizer, other):
        train(it, 0)
    theirs = [p for group in other.param_groups for p in group["params"]]
    torch.testing.assert_close(theirs, mine, rtol=0, atol=0)


def test_params_as_torchs_optimizers_take_them() -> None:
    """A tensor, names, and a group that joins later."""
    a, b, c, d, e = parameters([(4, 4), (4,), (4, 4), (4,), (4, 4)])
    optimizer = Muon([{"params": a}, {"params": b}], matrices=[a])
    optimizer.add_param_group({"params": [c, d], "lr": 0.5})
    optimizer.add_param_group({"params": [e], "muon": True})
    assert [g["muon"] for g in optimizer.param_groups] == [True, False, False, True]
    before = [p.detach().clone() for p in (a, b, c, d, e)]
    train(optimizer, 0, steps=1)
    assert not any(p.equal(old) for p, old in zip((a, b, c, d, e), before, strict=True))
    named = Muon([("w", a), ("b", b)], matrices=[a])  # type: ignore[list-item]
    assert [g["param_names"] for g in named.param_groups] == [["w"], ["b"]]


# ---------------------------------------------------------------- which parameters


def test_hidden_matrices_of_a_convnet() -> None:
    model = network()
    found = {
        name for name, p in model.named_parameters() if any(p is m for m in hidden_matrices(model))
    }
    assert found == {"2.weight", "4.weight", "6.weight"}  # not the first, the depthwise, the last


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.position = Parameter(torch.zeros(1, 4, 8))
        self.enter = nn.Linear(8, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.tied = nn.Linear(8, 11, bias=False)
        self.tied.weight = self.words.weight
        self.head = nn.Linear(8, 2)


def test_hidden_matrices_of_a_transformer() -> None:
    model = Transformer()
    found = {
        name for name, p in model.named_parameters() if any(p is m for m in hidden_matrices(model))
    }
    assert found == {
        "block.self_attn.in_proj_weight", "block.self_attn.out_proj.weight", "block.linear1.weight",
        "block.linear2.weight",
    }  # fmt: skip


def test_frozen_weights_are_left_out_and_the_ends_stay_the_ends() -> None:
    model = network()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    assert [tuple(m.shape) for m in hidden_matrices(model)] == [(6, 8, 1, 3), (5, 6)]
    assert hidden_matrices(nn.Linear(3, 3)) == hidden_matrices(nn.ReLU()) == []


# ---------------------------------------------------------------- refused


def bad() -> Iterator[tuple[dict[str, Any], str]]:
    (a,) = parameters([(4, 4)])
    yield {"matrices": []}, "models without"
    yield {"matrices": parameters([(4, 4)])}, "1 of 1 matrices are in no parameter group"
    for settings, message in (
        ({"lr": 0.0}, "got 0.0"), ({"weight_decay": -1.0}, "-1.0"), ({"momentum": 1.0}, "got 1.0"),
        ({"betas": (0.9, 1.0)}, r"\(0.9, 1.0\)"), ({"eps": 0.0}, "0.0"), ({"ns_steps": 0}, "and 0"),
    ):  # fmt: skip
        yield {"matrices": [a], **settings}, message


@pytest.mark.parametrize(("settings", "message"), list(bad()))
def test_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    a, b = parameters([(4, 4), (4,)])
    matrices = [a] if settings["matrices"] and len(settings) > 1 else settings["matrices"]
    with pytest.raises(ValueError, match=message):
        Muon([a, b], **{**settings, "matrices": matrices})


def test_what_is_no_matrix_and_no_parameters_are_refused() -> None:
    a, b = parameters([(4, 4), (4,)])
    with pytest.raises(ValueError, match=r"got shapes \[\(4,\)\]"):
        Muon([a, b], matrices=[a, b])
    with pytest.raises(ValueError, match=r"got shapes \[\(4,\)\]"):
        Muon([a], matrices=[a]).add_param_group({"params": [b], "muon": True})
    with pytest.raises(ValueError, match="others must be 'adamw' or 'sgd', got 'adam'"):
        Muon([{"params": [a, b], "others": "adam"}], matrices=[a])
    with pytest.raises(ValueError, match="no parameters"):
        Muon(iter([]), matrices=[a])


def test_a_closure_is_refused() -> None:
    (a,) = parameters([(4, 4)])
    with pytest.raises(ValueError, match="no closure"):
        Muon([a], matrices=[a]).step(lambda: 0.0)  # type: ignore[arg-type, return-value]


@pytest.mark.gpu
@needs_cuda
def test_on_a_gpu_it_is_the_same_and_loads_a_state_of_the_cpu() -> None:
    def run(device: str) -> list[Tensor]:
        mine = [Parameter(p.detach().to(device)) for p in parameters([*SHAPES, (5,)])]
        optimizer = Muon(mine, matrices=mine[:4], lr=0.05, ns_dtype=torch.float32)
        train(optimizer, 1, steps=2)
        state = copy.deepcopy(optimizer.state_dict())
        on_cpu = {k: {n: t.cpu() for n, t in s.items()} for k, s in state["state"].items()}
        optimizer.load_state_dict({**state, "state": on_cpu})
        train(optimizer, 2, steps=2)
        return [p.detach().cpu() for p in mine]

    for a, b in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
