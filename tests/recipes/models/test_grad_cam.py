import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flambeau.recipes.models.grad_cam import grad_cam, heat_overlay


class Net(nn.Module):
    """Convolutions, the mean over the places, and a linear layer: where Grad-CAM is CAM."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.5)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).mean((2, 3)))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    net = Net().double()
    net(torch.randn(16, 3, 9, 7, dtype=torch.float64))  # statistics that are not 0 and 1
    return net


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_hand(front: nn.Module, back: nn.Module, images: Tensor, classes: list[int]) -> Tensor:
    """Equations 1 and 2, an image and a channel at a time, on a model cut in two."""
    maps = []
    for image, chosen in zip(images, classes, strict=True):
        activations = front(image[None])
        (gradient,) = torch.autograd.grad(back(activations)[0, chosen], activations)
        total = torch.zeros_like(activations[0, 0])
        for channel in range(activations.shape[1]):
            total += gradient[0, channel].mean() * activations[0, channel]
        maps.append(total.clamp(min=0).detach())
    return torch.stack(maps)


def test_is_cam_where_a_mean_and_a_linear_layer_follow(net: Net, images: Tensor) -> None:
    """Zhou et al. 2016: the channels weighed by the class's row; the mean divides by the places."""
    classes = torch.tensor([0, 3, 4, 4])
    maps = grad_cam(net, images, net.trunk, classes=classes)
    net.eval()
    activations = net.trunk(images)
    cam = (net.head.weight[classes][:, :, None, None] * activations).sum(1).relu() / (7 * 5)
    torch.testing.assert_close(maps, cam.detach())
    assert (maps > 0).any()


@pytest.mark.parametrize("cut", [1, 2])
def test_equals_the_paper_in_any_layer(net: Net, images: Tensor, cut: int) -> None:
    """Behind the first convolution comes a BatchNorm, behind that a ReLU that works in place."""
    maps = grad_cam(net, images, net.trunk[cut - 1], classes=torch.tensor([1, 2, 3, 0]))
    alone = copy.deepcopy(net).eval()
    alone.trunk[2] = nn.ReLU()

    def back(x: Tensor) -> Tensor:
        return alone.head(alone.trunk[cut:](x).mean((2, 3)))

    torch.testing.assert_close(maps, by_hand(alone.trunk[:cut], back, images, [1, 2, 3, 0]))


def test_of_a_resnet(images: Tensor) -> None:
    import torchvision

    torch.manual_seed(0)
    resnet = torchvision.models.resnet18(num_classes=6)
    photos = torch.randn(2, 3, 64, 64)
    maps = grad_cam(resnet, photos, resnet.layer3)
    resnet.eval()
    front = nn.Sequential(*list(resnet.children())[:7])
    back = nn.Sequential(resnet.layer4, resnet.avgpool, nn.Flatten(), resnet.fc)
    best = resnet(photos).argmax(1).tolist()
    torch.testing.assert_close(maps, by_hand(front, back, photos, best), rtol=1e-3, atol=1e-6)


def test_nothing_of_the_model_changes(net: Net, images: Tensor) -> None:
    net.trunk[1].eval()  # a mixture of modes
    modes = [module.training for module in net.modules()]
    before = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        maps = grad_cam(net, images, net.trunk)
    with torch.inference_mode():
        again = grad_cam(net, images + 0, net.trunk)
    torch.testing.assert_close(again, maps, rtol=0, atol=0)
    assert [module.training for module in net.modules()] == modes
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not any(module._forward_hooks for module in net.modules())
    net.requires_grad_(False)
    torch.testing.assert_close(grad_cam(net, images, net.trunk), maps, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtype_follows_the_model(net: Net, images: Tensor, dtype: torch.dtype) -> None:
    maps = grad_cam(net.to(dtype), images.to(dtype), net.trunk)
    assert maps.dtype == dtype
    assert not maps.requires_grad


def test_a_map_is_for_its_class() -> None:
    """Two detectors: red on the left is class 0, green on the right class 1."""
    model = nn.Sequential(nn.Conv2d(3, 2, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model[0].weight.data = torch.tensor([[1.0, 0, 0], [0, 1, 0]])[:, :, None, None]
    image = torch.zeros(1, 3, 4, 4)
    image[:, 0, :, :2] = 1
    image[:, 1, :, 2:] = 1
    for chosen, columns in ((0, slice(0, 2)), (1, slice(2, 4))):
        maps = grad_cam(model, image, model[0], classes=torch.tensor([chosen]))
        expected = torch.zeros(1, 4, 4)
        expected[:, :, columns] = 1 / 16
        torch.testing.assert_close(maps, expected)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, 3, 1)
        self.never = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x)).mean((2, 3))


def test_refused(net: Net, images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"layer must be a module of the model, such as"):
        grad_cam(net, images, nn.Conv2d(3, 3, 1))
    with pytest.raises(ValueError, match=r"output of the layer must be .*, got \(4, 5\)"):
        grad_cam(net, images, net.head)
    with pytest.raises(ValueError, match=r"the model must return logits .*, got \(4, 8, 7, 5\)"):
        grad_cam(net.trunk, images, net.trunk[0])
    with pytest.raises(ValueError, match=r"classes must be \(4,\), .*, got \(1,\)"):
        grad_cam(net, images, net.trunk, classes=torch.tensor([0]))
    twice = Twice().double()
    with pytest.raises(RuntimeError, match="ran 2 times"):
        grad_cam(twice, images, twice.inner)
    with pytest.raises(RuntimeError, match="ran 0 times"):
        grad_cam(twice, images, twice.never)
    assert not any(module._forward_hooks for module in net.modules())
    assert net.training


def test_overlay_is_the_map_enlarged_and_colored() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    images = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    maps = torch.rand(2, 4, 4, dtype=torch.float64)
    got = heat_overlay(images, 7 * maps, opacity=0.25)  # the scale of a map has no effect
    large = F.interpolate(maps[:, None], (8, 8), mode="bilinear")[:, 0]
    colors = matplotlib.colormaps["jet"]((large / large.amax((1, 2), keepdim=True)).numpy())
    mixed = 0.75 * images + 0.25 * torch.from_numpy(colors)[..., :3].permute(0, 3, 1, 2)
    torch.testing.assert_close(got, mixed, rtol=0, atol=0.06)  # its jet has slightly other ends
    torch.testing.assert_close(heat_overlay(images, maps, opacity=0), images.expand(2, 3, 8, 8))


def test_overlay_of_an_empty_map_and_refused() -> None:
    images = torch.zeros(1, 3, 2, 2)
    blue = torch.tensor([0.0, 0.0, 0.5])[None, :, None, None].expand(1, 3, 2, 2)
    torch.testing.assert_close(heat_overlay(images, torch.zeros(1, 2, 2), opacity=1), blue)
    with pytest.raises(ValueError, match=r"images must be .*, got \(3, 2, 2\)"):
        heat_overlay(images[0], torch.zeros(1, 2, 2))
    with pytest.raises(ValueError, match=r"maps must be \(1, h, w\), got \(2, 2, 2\)"):
        heat_overlay(images, torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match="opacity must lie from 0 to 1, got 2"):
        heat_overlay(images, torch.zeros(1, 2, 2), opacity=2)
