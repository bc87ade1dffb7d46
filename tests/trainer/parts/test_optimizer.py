"""The optimizers of the command: each that of torch, undone where a step is bad, and resumed to the bit."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

from flambeau.errors import InputError
from flambeau.recipes.models.param_groups import param_groups
from flambeau.recipes.training.amp_step import AmpStep
from flambeau.run.run import Run
from flambeau.trainer.parts.optimizer import BASE_LR, new_optimizer, without_compiler
from flambeau.trainer.settings.settings import FIELDS, MOMENTUM, Settings

NAMES = FIELDS["optimizer"].metadata["choices"]
TORCHS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, {}),
    "adamw": (optim.AdamW, {}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "adamax": (optim.Adamax, {}),
    "adagrad": (optim.Adagrad, {}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.9}),
}


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        # A bias before a norm has no gradient but noise, which Adam would blow up.
        nn.Linear(6, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.Linear(8, 2),
    )


def made(name: str, model: nn.Module, **settings: Any) -> optim.Optimizer:
    groups = param_groups(model, weight_decay=0.01)
    return new_optimizer(name, model, groups, lr=0.01, **settings)


def data() -> TensorDataset:
    x = torch.randn(46, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = data()[seed : seed + 20]
    return F.cross_entropy(model(x), y)


def test_there_is_a_rate_and_a_peer_for_each() -> None:
    assert set(NAMES) == set(BASE_LR) == {*TORCHS, "muon"}
    assert set(MOMENTUM) < set(NAMES)


@pytest.mark.parametrize("name", list(TORCHS))
def test_equals_torchs_plain_loop(name: str) -> None:
    mine, theirs = network(), network()
    kind, settings = TORCHS[name]
    peer = kind(param_groups(theirs, weight_decay=0.01), lr=0.01, foreach=False, **settings)
    for model, optimizer in ((mine, made(name, mine)), (theirs, peer)):
        for step in range(8):  # RAdam is another one for its first five
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    for (key, a), b in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_step_changes_nothing(name: str) -> None:
    model = network()
    optimizer = made(name, model)
    amp = AmpStep(optimizer)
    for step in range(2):
        amp.backward(loss_of(model, step))
        amp.step()
    before = copy.deepcopy((list(model.parameters()), optimizer.state_dict()))
    amp.backward(loss_of(model, 3) * torch.nan)
    amp.step()
    weights, state = before
    torch.testing.assert_close(list(model.parameters()), weights, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]
    assert float(amp.skipped) == 1.0


class Stop(Exception):
    """Stands for a kill."""


def train(folder: Path, name: str, *, stop_after: int | None = None) -> dict[str, torch.Tensor]:
    model = network()
    run = Run(
        folder, model, made(name, model), data(), duration="2ep", batch_size=8, schedule="cosine",
        checkpoint_every="5st", clip_norm=1.0, bar=False,
    )  # fmt: skip
    passes = 0
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(F.cross_entropy(model(x), y))
            passes += 1
            if passes == stop_after:
                run.close()
                raise Stop
        for x, y in run.evaluate(data()):
            run.log(val_accuracy=model(x).argmax(1) == y)
    return safetensors.torch.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_a_resume_is_exact(name: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", name)
    with pytest.raises(Stop):
        train(tmp_path / "killed", name, stop_after=7)
    torch.testing.assert_close(train(tmp_path / "killed", name), whole, rtol=0, atol=0)


def test_momentum_is_that_of_the_setting() -> None:
    for name in MOMENTUM:
        groups = made(name, network(), momentum=0.5).param_groups
        assert groups[0]["momentum"] == 0.5
        assert made(name, network()).param_groups[0]["momentum"] == MOMENTUM[name]
    plain = made("sgd", network(), momentum=0.0)
    assert plain.param_groups[0]["nesterov"] is False  # torch has no Nesterov without momentum


def test_muon_gets_its_fixed_norm() -> None:
    (matrices, *_) = made("muon", network(), fixed_norm=True).param_groups
    assert (matrices["muon"], matrices["fixed_norm"]) == (True, True)
    assert made("muon", network()).param_groups[0]["fixed_norm"] is False


def test_muon_needs_a_hidden_matrix() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    with pytest.raises(InputError, match="use adamw"):
        made("muon", model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adamw", "momentum": 0.9}, "no effect with optimizer = 'adamw'"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"optimizer": "muon", "shard": "fsdp"}, "needs whole ones"),
        ({"optimizer": "lion"}, "optimizer must be one of"),
    ],
)
def test_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(**settings)


def test_methods_are_those_of_torch_again_also_after_an_error() -> None:
    before = {name: vars(optim.Optimizer)[name] for name in ("add_param_group", "zero_grad")}
    with pytest.raises(KeyError), without_compiler():
        assert vars(optim.Optimizer)["zero_grad"] is not before["zero_grad"]
        raise KeyError
    assert {name: vars(optim.Optimizer)[name] for name in before} == before


def test_a_training_does_not_import_the_compiler(tmp_path: Path) -> None:
    """torch's optimizers and its deterministic mode import it, also where nothing is compiled."""
    script = (
        "import sys\n"
        "from flambeau.cli.command import main\n"
        "assert main(['train', '--duration', '2st', '--device', 'cpu']) == 0\n"
        "print('imported:', *{'torch._dynamo', 'torch._inductor', 'sympy'} & {*sys.modules})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "imported:"
