import copy
from collections.abc import Callable

import pytest
import torch
from timm.layers import BatchNormAct2d
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

from flambeau.recipes.memory.inplace_relu import use_inplace_relu


class Net(nn.Module):
    """A body of its own between two convolutions; the activations are a, b and c."""

    def __init__(self, body: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.norm, self.drop = nn.BatchNorm2d(4), nn.Dropout()
        self.a, self.b, self.c = nn.ReLU(), nn.LeakyReLU(0.1), nn.ReLU()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.body(self, self.conv(x)))
        return out


def preact_residual(net: Net, x: Tensor) -> Tensor:
    return x + net.b(net.norm(net.a(x)))


def read_by_sigmoid(net: Net, x: Tensor) -> Tensor:
    return net.a(torch.sigmoid(x))  # its backward reads the output that would be overwritten


def chain(net: Net, x: Tensor) -> Tensor:
    return net.c(net.norm(net.b(net.norm(net.a(x)))))


def shared(net: Net, x: Tensor) -> Tensor:
    return torch.sigmoid(x) * net.a(net.norm(x)) * net.a(torch.sigmoid(x))


def in_eval_only(net: Net, x: Tensor) -> Tensor:
    return x + net.a(net.drop(x))  # dropout gives x itself in eval mode


def image() -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("body", "enabled", "left"),
    [
        (chain, ["a", "b", "c"], {}),
        (preact_residual, ["b"], {"a": "its input is read elsewhere"}),
        (read_by_sigmoid, [], {"a": "modified by an inplace operation"}),
        (shared, [], {"a": "modified by an inplace operation"}),
        (in_eval_only, [], {"a": "its input is read elsewhere"}),
    ],
)
def test_only_the_harmless_are_switched_on(
    body: Callable[[Net, Tensor], Tensor], enabled: list[str], left: dict[str, str]
) -> None:
    torch.manual_seed(0)
    net = Net(body)
    report = use_inplace_relu(net, image())
    used = {"a", "b", "c"} & {*enabled, *left}
    assert [name for name in report.enabled if name in used] == enabled
    for name, reason in left.items():
        assert reason in report.left[name]
    assert net.a.inplace == ("a" in report.enabled)


def test_silent_change_is_found_where_the_example_has_no_negative_number() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            z = x * 1
            return self.act(z) + z

    wrong = Residual()
    wrong.act.inplace = True
    minus = torch.tensor([-1.0])
    assert wrong(minus) == 0  # -1 became 0, without a word
    right = Residual()
    assert right(minus) == -1
    assert use_inplace_relu(right, torch.tensor([1.0])).enabled == []
    assert right(minus) == -1


def test_first_layer_would_overwrite_the_batch() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    x = torch.ones(2, 1, 2, 2)
    assert use_inplace_relu(model, x).left["0"]
    torch.testing.assert_close(x, torch.ones(2, 1, 2, 2), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("activation", "saves"), [(nn.ReLU(), False), (nn.LeakyReLU(0.1), True), (nn.ReLU6(), None)]
)
def test_what_is_kept(activation: nn.Module, saves: bool | None) -> None:
    """ReLU keeps its output anyway: in place it keeps no less, but writes one tensor less."""
    conv = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(conv, nn.BatchNorm2d(3), activation, copy.deepcopy(conv))
    report = use_inplace_relu(model, image())
    size = image().nbytes
    assert report.kept_bytes_before - report.kept_bytes_after == (size if saves else 0)
    assert report.avoided_bytes == (0 if saves is None else size)
    assert report.left == {}


def test_nothing_else_changes() -> None:
    torch.manual_seed(0)
    net = Net(chain)
    net.norm.eval()
    before = copy.deepcopy(net.state_dict())
    rng, x = torch.get_rng_state(), image()
    use_inplace_relu(net, x)
    assert torch.equal(rng, torch.get_rng_state())
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(x, image(), rtol=0, atol=0)
    assert not net.norm.training
    assert net.conv.training
    assert net.conv.weight.grad is None
    assert not net._forward_pre_hooks
    assert not net.a._forward_pre_hooks


def test_an_exception_leaves_the_model_alone() -> None:
    def fails(net: Net, x: Tensor) -> Tensor:
        if net.a.inplace:
            raise KeyError("of the model's own")
        return net.a(x)

    net = Net(fails)
    with pytest.raises(KeyError):
        use_inplace_relu(net, image())
    assert not net.a.inplace
    with pytest.raises(RuntimeError, match="expected input"):
        use_inplace_relu(Net(chain), image()[:, :2])


def test_other_signatures() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()
            self.table = nn.Embedding(3, 4)

        def forward(self, index: Tensor, scale: float) -> dict[str, Tensor]:
            return {"out": self.act(self.table(index) * scale)}

    assert use_inplace_relu(Two(), torch.tensor([0, 2]), 2.0).enabled == ["act"]
    assert use_inplace_relu(nn.Linear(2, 2), torch.ones(1, 2)).enabled == []


def test_what_differs_by_itself_is_refused() -> None:
    class Noisy(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Noisy.calls += 1
            return x + Noisy.calls

    with pytest.raises(ValueError, match="two runs of the model on the example differ"):
        use_inplace_relu(nn.Sequential(Noisy(), nn.ReLU()), torch.ones(2))


def switched_off(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


def small_resnet() -> nn.Module:
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=2)  # resnet18 has two blocks each


def test_torchvisions_resnet() -> None:
    torch.manual_seed(0)
    model = switched_off(small_resnet())
    report = use_inplace_relu(model, torch.randn(2, 3, 32, 32))
    # torchvision sets all of them in place itself.
    names = [n for n, m in small_resnet().named_modules() if isinstance(m, nn.ReLU)]
    assert sorted(report.enabled) == sorted(names)
    assert report.kept_bytes_after == report.kept_bytes_before
    assert report.avoided_bytes > 0


def test_timms_preactivation_net() -> None:
    """Its norm layers hold the ReLU, which reads what no other layer does."""

    torch.manual_seed(0)
    model = switched_off(
        ResNetV2(
            layers=(1, 1), channels=(16, 32), num_classes=2, stem_chs=8, norm_layer=BatchNormAct2d
        )
    )
    relus = [n for n, m in model.named_modules() if isinstance(m, nn.ReLU)]
    report = use_inplace_relu(model, torch.randn(2, 3, 32, 32))
    assert len(report.enabled) >= 5
    assert sorted([*report.enabled, *report.left]) == sorted(relus)


def test_an_activation_of_a_parameter_does_not_spoil_the_others() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.act = nn.Parameter(torch.ones(4)), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x * self.act(self.scale)
            return out

    model = nn.Sequential(nn.Linear(2, 4), Gate(), nn.Linear(4, 4), nn.ReLU())
    report = use_inplace_relu(model, torch.randn(3, 2))
    assert report.enabled == ["3"]
    assert list(report.left) == ["1.act"]
