"""AmpStep against torch.amp.GradScaler and torch.nn.utils.clip_grad_norm_, step by step."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from flambeau.recipes.training.amp_step import AmpStep

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd-dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5}),
}
FUSED = ("sgd", "sgd-dampening", "adam", "adamw")
CASES = [(name, False) for name in OPTIMIZERS] + [(name, True) for name in FUSED]


def make(name: str, fused: bool, **settings: Any) -> tuple[nn.Module, AmpStep]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    kind, options = OPTIMIZERS[name]
    options = {**options, "fused": True} if fused else options
    return model, AmpStep(kind(model.parameters(), **options), **settings)


def batch(step: int) -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(step))


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [
        v
        for s in optimizer.state_dict()["state"].values()
        for v in s.values()
        if isinstance(v, Tensor)
    ]
    return [p.detach().clone() for p in model.parameters()] + [v.clone() for v in state]


@pytest.mark.parametrize(("name", "fused"), CASES)
@pytest.mark.parametrize("max_norm", [None, 0.05, 1e6])
def test_fp32_equals_the_plain_loop(name: str, fused: bool, max_norm: float | None) -> None:
    model, amp = make(name, fused, max_norm=max_norm)
    other, _ = make(name, False)
    kind, options = OPTIMIZERS[name]
    optimizer = kind(other.parameters(), **options)
    for step in range(5):
        amp.backward(model(batch(step)).square().mean())
        amp.step()
        other(batch(step)).square().mean().backward()
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(other.parameters(), max_norm)
            torch.testing.assert_close(amp.norm, norm)
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "fused"), CASES)
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_fp16_equals_grad_scaler(name: str, fused: bool, max_norm: float | None) -> None:
    """With an overflow in the first and the fourth step: skipped, halved, grown as torch does."""
    # Dampening skips the step that makes the momentum, and no device can know which that was: see the recipe.
    bad = (1, 3) if name == "sgd-dampening" else (0, 3)
    model, amp = make(
        name, fused, precision="fp16", max_norm=max_norm, init_scale=1024.0, growth_interval=2
    )
    other, _ = make(name, False)
    kind, options = OPTIMIZERS[name]
    optimizer = kind(other.parameters(), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(9):
        factor = float("inf") if step in bad else 1.0
        amp.backward(model(batch(step)).square().mean() * factor)
        amp.step()
        scaler.scale(other(batch(step)).square().mean() * factor).backward()
        scaler.unscale_(optimizer)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(other.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert float(amp.skipped) == (step in bad)
        assert float(amp.halted) == 0
        scales.append(amp.loss_scale())
        assert scales[-1] == scaler.get_scale()
    assert len(set(scales)) > 2  # it went down and up
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=5e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "fused"), CASES)
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_step_changes_no_bit(name: str, fused: bool, when: int, bad: float) -> None:
    """Also the first one, where fused SGD leaves its momentum unfilled if it is not made before."""
    model, amp = make(name, fused, max_norm=1.0)
    before: list[Tensor] = []
    for step in range(4):
        if step == when:
            before = everything(model, amp.optimizer)
        amp.backward(model(batch(step)).square().mean() * (bad if step == when else 1.0))
        amp.step()
        if step == when:
            after = everything(model, amp.optimizer)
            if when == 0:  # state that the step has made: as if there were none
                assert all(not t.any() for t in after[len(before) :])
            for old, new in zip(before, after, strict=False):
                torch.testing.assert_close(new, old, rtol=0, atol=0)
            assert float(amp.skipped) == 1
    assert float(amp.skipped) == 0
    assert all(torch.isfinite(t).all() for t in everything(model, amp.optimizer))
    assert not torch.equal(everything(model, amp.optimizer)[0], before[0])


@pytest.mark.parametrize("name", FUSED)
def test_halt_freezes_until_it_is_cleared(name: str) -> None:
    model, amp = make(name, True, halt=True)
    amp.backward(model(batch(0)).square().mean())
    amp.step()
    before = everything(model, amp.optimizer)
    for step in range(1, 4):
        loss = model(batch(step)).square().mean()
        amp.backward(loss)
        amp.step(watch=[torch.tensor(float("nan"))] if step == 1 else [loss.detach()])
    for old, new in zip(before, everything(model, amp.optimizer), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
    amp.halted.zero_()
    amp.backward(model(batch(4)).square().mean())
    amp.step()
    assert not torch.equal(before[0], everything(model, amp.optimizer)[0])


def test_halt_in_fp16_only_by_what_is_watched() -> None:
    model, amp = make("adamw", True, precision="fp16", halt=True)
    amp.backward(model(batch(0)).square().mean() * float("inf"))
    amp.step()
    assert (float(amp.skipped), float(amp.halted)) == (1, 0)
    amp.backward(model(batch(1)).square().mean())
    amp.step(watch=[torch.tensor(float("inf"))])
    assert (float(amp.skipped), float(amp.halted)) == (1, 1)


def test_weighted_backward_is_the_gradient_of_the_whole_batch() -> None:
    model, amp = make("sgd", True)
    x = batch(0)
    model(x).square().mean().backward()
    whole = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for part in x.split([7, 7, 2]):
        amp.backward(model(part).square().mean(), weight=len(part) / len(x))
    for p, expected in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(p.grad, expected)


def test_many_weights_take_no_more_memory() -> None:
    layer = torch.nn.Linear(1, 1)
    amp = AmpStep(torch.optim.SGD(layer.parameters(), lr=0.1))
    for number in range(1, 300):
        amp.backward(layer(torch.ones(1, 1)).sum(), weight=1 / number)
    assert len(amp._roots) <= 64
    expected = sum(1 / number for number in range(1, 300))
    torch.testing.assert_close(layer.bias.grad, torch.tensor([expected]))


def test_mixed_dtypes_and_missing_gradients() -> None:
    a, b, unused = (
        nn.Parameter(torch.ones(3)),
        nn.Parameter(torch.ones(3).double()),
        nn.Parameter(torch.ones(2)),
    )
    amp = AmpStep(torch.optim.SGD([a, b, unused], lr=1.0), max_norm=1.0)
    amp.backward((3 * a).sum() + (4 * b).sum())
    amp.step()
    norm = (27 + 48) ** 0.5
    torch.testing.assert_close(float(amp.norm), norm)
    torch.testing.assert_close(a.detach(), torch.full((3,), 1 - 3 / norm))
    torch.testing.assert_close(b.detach(), torch.full((3,), 1 - 4 / norm, dtype=torch.float64))
    torch.testing.assert_close(unused.detach(), torch.ones(2))


def test_autocast_dtype_and_state_round_trip() -> None:
    for precision, dtype in (
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ):
        model, amp = make("adamw", True, precision=precision)
        with amp.autocast():
            assert model(batch(0)).dtype is dtype
    amp.backward(model(batch(0)).square().mean() * float("inf"))
    amp.step()
    _, fresh = make("adamw", True, precision="fp16")
    fresh.load_state_dict(copy.deepcopy(amp.state_dict()))
    assert fresh.loss_scale() == amp.loss_scale() == 32768.0  # half of 65536


def test_worked_example_of_the_note() -> None:
    """Scale 65536, gradients of 1 in two weights, clipped together."""
    x, z = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    amp = AmpStep(torch.optim.SGD([x, z], lr=0.001, fused=True), precision="fp16", max_norm=1.0)
    assert amp.loss_scale() == 65536.0
    amp.backward((x + z).sum())
    torch.testing.assert_close(x.grad, torch.full((1,), 65536.0))
    amp.step()
    torch.testing.assert_close(x.detach(), torch.full((1,), 1 - 0.001 / 2**0.5))


def test_hooks_schedulers_and_profilers_see_every_step() -> None:
    """The wrapper of `optimizer.step` is left out only where nobody would notice."""
    model, amp = make("sgd", True)
    seen: list[str] = []

    def step() -> None:
        amp.backward(model(batch(0)).square().mean())
        amp.step()

    step()
    handles = [
        amp.optimizer.register_step_pre_hook(lambda *_: seen.append("pre")),
        amp.optimizer.register_step_post_hook(lambda *_: seen.append("post")),
    ]
    step()
    assert seen == ["pre", "post"]
    for handle in handles:
        handle.remove()
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("global"))
    step()
    handle.remove()
    assert seen == ["pre", "post", "global"]
    with torch.autograd.profiler.profile() as profile:
        step()
    assert any(event.key == "Optimizer.step#SGD.step" for event in profile.key_averages())
    scheduler = torch.optim.lr_scheduler.StepLR(amp.optimizer, step_size=1)
    step()
    scheduler.step()  # would warn if it had not seen the optimizer's step


def test_a_loss_without_a_graph_and_a_subclass() -> None:
    model, amp = make("sgd", True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        amp.backward(torch.tensor(1.0))

    class Loss(Tensor):
        pass

    amp.backward(model(batch(0)).square().mean().as_subclass(Loss))
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"precision": "int8"}, "precision"),
        ({"max_norm": 0.0}, "max_norm"),
        ({"max_norm": float("nan")}, "max_norm"),
    ],
)
def test_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make("sgd", True, **settings)


def test_refused_devices() -> None:
    parameters = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, device="meta"))]
    with pytest.raises(ValueError, match="one device"):
        AmpStep(torch.optim.SGD(parameters, lr=0.1))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_no_value_is_asked_of_the_device(precision: str, max_norm: float | None) -> None:
    """The meta device has none to give, and refuses a tensor of the CPU."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    model = model.to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp = AmpStep(optimizer, precision=precision, max_norm=max_norm, halt=True)
    for _ in range(2):
        loss = model(torch.ones(5, 3, 8, 8, device="meta")).square().mean()
        amp.backward(loss, weight=0.5)
        amp.step(watch=[loss.detach()])


def test_a_step_count_on_the_cpu_is_what_waits() -> None:
    """As the docstring says: torch's Adam has it there unless it is fused or capturable."""
    layer = nn.Linear(2, 1, device="meta")
    amp = AmpStep(torch.optim.Adam(layer.parameters()))
    amp.backward(layer(torch.ones(3, 2, device="meta")).mean())
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        amp.step()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_synchronisation_on_cuda(precision: str) -> None:
    model = nn.Linear(4, 1).cuda()
    amp = AmpStep(
        torch.optim.AdamW(model.parameters(), fused=True),
        precision=precision,
        max_norm=1.0,
        halt=True,
    )
    x = torch.randn(8, 4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            with amp.autocast():
                loss = model(x).square().mean()
            amp.backward(loss)
            amp.step(watch=[loss.detach().float()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(amp.halted) == 0


def test_a_step_that_somebody_has_wrapped_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrappers of torch are passed by where nothing needs them; those of a tracing tool are not."""
    own = torch.optim.SGD.step
    calls: list[bool] = []

    @functools.wraps(own)
    def traced(*args: Any, **kwargs: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return own(*args, **kwargs)

    monkeypatch.setattr(torch.optim.SGD, "step", traced)
    model, amp = make("sgd", True)
    before = everything(model, amp.optimizer)
    amp.backward(model(batch(0)).square().mean())
    amp.step()
    assert len(calls) == 1
    assert any(
        not torch.equal(a, b)
        for a, b in zip(before, everything(model, amp.optimizer), strict=False)
    )
