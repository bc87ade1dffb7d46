import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flambeau.recipes.training.sam import perturbed, sam_gradients

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
RHO = 0.3


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).double()


def closure_of(model: nn.Module, *, scale: float = 1.0) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        loss = model(X).square().mean()
        (loss * scale).backward()
        return loss

    return closure


def reference(model: nn.Module, *, adaptive: bool) -> list[Tensor]:
    """Algorithm 1, written for one flat vector, with a functional model."""
    names = [name for name, _ in model.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in model.parameters()]

    def grads_at(weights: list[Tensor]) -> list[Tensor]:
        model_copy = copy.deepcopy(model)
        out = torch.func.functional_call(model_copy, dict(zip(names, weights, strict=True)), (X,))
        return list(torch.autograd.grad(out.square().mean(), weights))

    g = grads_at(values)
    t = [
        (w.abs() + 0.01 if adaptive and not name.endswith("bias") else torch.ones_like(w)).detach()
        for name, w in zip(names, values, strict=True)
    ]
    norm = sum((a * b).square().sum() for a, b in zip(t, g, strict=True)).sqrt()  # type: ignore[union-attr]
    moved = [
        (w + RHO * a * a * b / norm).detach().requires_grad_()
        for w, a, b in zip(values, t, g, strict=True)
    ]
    return grads_at(moved)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("adaptive", [False, True])
def test_sharded_weights_move_and_come_back(adaptive: bool) -> None:
    """One rank alone: its tensors are DTensors all the same. Two ranks gave the same by hand."""
    from torch.distributed.fsdp import fully_shard

    model, plain = make(), make()
    before = [p.detach().clone() for p in plain.parameters()]
    fully_shard(model)
    for it in (model, plain):
        sam_gradients(it, closure_of(it), rho=RHO, adaptive=adaptive)
    for sharded, whole, old in zip(model.parameters(), plain.parameters(), before, strict=True):
        assert torch.equal(sharded.full_tensor(), old)
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("adaptive", [False, True])
def test_equals_the_algorithm(adaptive: bool) -> None:
    model = make()
    before = copy.deepcopy(model)
    plain = copy.deepcopy(model)
    expected = reference(model, adaptive=adaptive)
    loss = sam_gradients(model, closure_of(model), rho=RHO, adaptive=adaptive)
    assert not loss.requires_grad
    for parameter, grad, old in zip(model.parameters(), expected, before.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(parameter, old, rtol=0, atol=0)
    # BatchNorm saw one batch, at the weights themselves; the loss is the one there.
    torch.testing.assert_close(closure_of(plain)(), loss.clone().requires_grad_())
    for (name, buffer), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=0, atol=0, msg=name)
    assert model[1].track_running_stats


def test_the_loss_is_higher_inside() -> None:
    model = make()
    first = closure_of(model)()
    with perturbed(model, rho=1e-4) as norm:
        assert all(p.grad is None for p in model.parameters())
        second = closure_of(model)()
    assert second > first
    # To first order by rho times the norm of the gradient.
    torch.testing.assert_close(second - first, 1e-4 * norm, rtol=0.01, atol=0)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_loss_scale_cancels_out(adaptive: bool) -> None:
    model = make()
    expected = reference(model, adaptive=adaptive)
    sam_gradients(model, closure_of(model, scale=1024.0), rho=RHO, adaptive=adaptive)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad / 1024, grad, rtol=1e-9, atol=1e-12)


def test_the_gradient_scaler_of_torch_steps_and_skips() -> None:
    model, plain = make().float(), make().float()
    x = X.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    overflow = 1.0

    def closure() -> Tensor:
        loss = model(x).square().mean()
        scaler.scale(loss * overflow).backward()
        return loss

    expected = reference(plain.double(), adaptive=False)
    sam_gradients(model, closure, rho=RHO)
    scaler.step(optimizer)
    scaler.update()
    for p, w, g in zip(model.parameters(), plain.parameters(), expected, strict=True):
        torch.testing.assert_close(p.double(), w - 0.1 * g, rtol=1e-5, atol=1e-6)
    before, overflow = copy.deepcopy(model[0].weight), 1e38  # finite, but not after scaling
    sam_gradients(model, closure, rho=RHO)
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)
    assert scaler.get_scale() == 512


def test_two_groups_clipping_and_old_gradients() -> None:
    model = make()
    optimizer = torch.optim.SGD(
        [{"params": model[:2].parameters(), "lr": 0.1}, {"params": model[2:].parameters()}], lr=1.0
    )
    expected = reference(model, adaptive=False)
    for p in model.parameters():
        p.grad = torch.randn_like(p)  # gradients that lie around must not count
    old = [p.detach().clone() for p in model.parameters()]
    sam_gradients(model, closure_of(model), rho=RHO)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(norm, torch.cat([g.flatten() for g in expected]).norm())
    optimizer.step()
    for i, (p, w, g) in enumerate(zip(model.parameters(), old, expected, strict=True)):
        lr = 0.1 if i < 4 else 1.0
        torch.testing.assert_close(p.detach(), w - lr * g * 1e-3 / (norm + 1e-6))


def test_accumulated_micro_batches() -> None:
    model = nn.Linear(4, 2).double()
    expected = reference(model, adaptive=False)

    def closure() -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for rows in X.split(2):
            loss = model(rows).square().mean() / 3
            loss.backward()
            total += loss.detach()
        return total

    sam_gradients(model, closure, rho=RHO)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


def test_frozen_and_unused_parameters_stay() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "unused": nn.Linear(2, 2)}).double()
    model["used"].bias.requires_grad_(False)
    model["used"](X).square().mean().backward()
    with perturbed(model, rho=RHO):
        model["used"](X).square().mean().backward()
    assert model["used"].bias.grad is None
    assert model["unused"].weight.grad is None
    assert model["used"].weight.grad is not None


def test_restored_on_an_exception() -> None:
    model = make()
    old = [p.detach().clone() for p in model.parameters()]
    closure_of(model)()
    with pytest.raises(KeyError), perturbed(model, rho=RHO):
        assert not torch.equal(model[0].weight, old[0])
        raise KeyError
    torch.testing.assert_close([p.detach() for p in model.parameters()], old, rtol=0, atol=0)
    assert model[1].track_running_stats


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_shows_and_changes_no_weight(bad: float) -> None:
    model = make()
    old = copy.deepcopy(model.state_dict())
    closure_of(model)()
    stats = copy.deepcopy(dict(model.named_buffers()))
    assert model[0].weight.grad is not None
    model[0].weight.grad[0, 0] = bad
    with perturbed(model, rho=RHO) as norm:
        closure_of(model)()
    assert not norm.isfinite()
    assert model[3].weight.grad is not None
    assert model[3].weight.grad.isnan().any()
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), old[name], rtol=0, atol=0)
    for name, value in model.named_buffers():
        torch.testing.assert_close(value, stats[name], rtol=0, atol=0)


def test_half_precision_weights_have_a_float32_norm() -> None:
    model = nn.Linear(4, 2).to(torch.bfloat16)
    model(X.bfloat16()).sum().backward()
    with perturbed(model, rho=0.5) as norm:
        assert norm.dtype == torch.float32


def test_eval_batchnorm_stays_in_eval() -> None:
    model = make()
    model[1].eval()
    stats = copy.deepcopy(dict(model.named_buffers()))
    sam_gradients(model, closure_of(model), rho=RHO)
    for name, value in model.named_buffers():
        torch.testing.assert_close(value, stats[name], rtol=0, atol=0)
    assert model[1].track_running_stats


def test_refusals() -> None:
    model = make()
    with pytest.raises(ValueError, match="rho must be above 0"):
        sam_gradients(model, closure_of(model), rho=0.0)
    with (
        pytest.raises(ValueError, match="no parameter has a gradient"),
        perturbed(model, rho=0.1),
    ):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda() -> None:
    model = nn.Linear(4, 2).double()
    expected = reference(model, adaptive=False)
    model.to("cuda")

    def closure() -> Tensor:
        loss = model(X.to("cuda")).square().mean()
        loss.backward()
        return loss

    sam_gradients(model, closure, rho=RHO)
    torch.testing.assert_close([p.grad.cpu() for p in model.parameters()], expected)  # type: ignore[union-attr]
