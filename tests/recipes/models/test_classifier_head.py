import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.models.classifier_head import Head, find_head, replace_head

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

# One classifier of each file of torchvision.models, and where its source puts the head.
TORCHVISION = {
    "alexnet": ["classifier.6"],
    "convnext_tiny": ["classifier.2"],
    "densenet121": ["classifier"],
    "efficientnet_b0": ["classifier.1"],
    "googlenet": ["fc", "aux1.fc2", "aux2.fc2"],
    "inception_v3": ["fc", "AuxLogits.fc"],
    "maxvit_t": ["classifier.5"],
    "mnasnet0_5": ["classifier.1"],
    "mobilenet_v2": ["classifier.1"],
    "mobilenet_v3_small": ["classifier.3"],
    "regnet_x_400mf": ["fc"],
    "resnet18": ["fc"],
    "shufflenet_v2_x0_5": ["fc"],
    "squeezenet1_0": ["classifier.1"],
    "swin_t": ["head"],
    "vgg11": ["classifier.6"],
    "vit_b_16": ["heads.head"],
}
TIMM = [
    "resnet18",
    "deit_tiny_distilled_patch16_224",  # two heads
    "levit_128s",  # BatchNorm in its heads
    "efficientvit_m0",  # and there `get_classifier` names the Linear layer alone
    "convnext_atto",
    "resnetv2_50",  # a convolution as head
    "vgg11",
]


def fails_on_meta(name: str) -> bool:
    return name.startswith("regnet")  # reads values while it is built


@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name: str) -> None:
    import torchvision

    with torch.device("cpu" if fails_on_meta(name) else "meta"):
        model = torchvision.models.get_model(name)
    before = {id(p) for p in model.parameters()}
    head = replace_head(model, 7)
    assert head.layers == TORCHVISION[name]
    new = [name for name, p in model.named_parameters() if id(p) not in before]
    assert head.parameters == new
    assert all(model.get_parameter(name).shape[0] == 7 for name in new)
    assert find_head(model) == head


def test_no_file_of_torchvision_is_left_out() -> None:
    from torchvision import models

    files = {models.get_model_builder(name).__module__ for name in models.list_models(models)}
    assert {models.get_model_builder(name).__module__ for name in TORCHVISION} == files


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    """The model's own `reset_classifier` decides; ours adds device, dtype and names."""
    import timm

    with torch.device("meta"):
        model = timm.create_model(name, num_classes=11).to(torch.bfloat16)
    before = dict(model.eval().named_parameters())
    found = find_head(model)
    head = replace_head(model, 7)
    new = [name for name, p in model.named_parameters() if p is not before[name]]
    assert new == head.parameters == found.parameters
    assert head == found == find_head(model)
    assert not any(module.training for module in model.modules())
    classifier = model.get_classifier()
    parts = classifier if isinstance(classifier, tuple | list) else [classifier]
    assert set(new) >= {
        name
        for name, p in model.named_parameters()
        if any(p is own for part in parts for own in part.parameters())
    }
    assert model.num_classes == 7
    for parameter in (model.get_parameter(name) for name in head.parameters):
        assert parameter.is_meta
        assert parameter.dtype == torch.bfloat16
    assert {b.dtype for b in model.buffers() if b.is_floating_point()} <= {torch.bfloat16}
    output = model(torch.empty(2, 3, 224, 224, device="meta", dtype=torch.bfloat16))
    assert output.shape == (2, 7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_file_of_timm() -> None:
    """One model of each first word of each file: what `find_head` names is what is renewed."""
    from timm import create_model
    from timm.models import list_models, list_modules

    named = {
        (file, re.split(r"[_\d]", name)[0]): name
        for file in list_modules()
        for name in sorted(list_models(module=file), key=len, reverse=True)
    }
    different = []
    for name in named.values():
        with torch.device("meta"):
            model = create_model(name, num_classes=11)
        before, found = {id(p) for p in model.parameters()}, find_head(model)
        head = replace_head(model, 7)
        new = [n for n, p in model.named_parameters() if id(p) not in before]
        assert head.parameters == new, name
        if not head == found == find_head(model):
            different.append(name.partition("_")[0])
    assert len(named) > 150
    # volo renews its auxiliary head too, repvit takes its distillation head away.
    assert different == ["repvit", "volo"]


def test_a_detector_is_refused() -> None:
    """Its boxes come last, in a list of 1x1 convolutions, which look like a head."""
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    with torch.device("meta"):
        model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    with pytest.raises(ValueError, match=r"regression_head.* may be the head, but so may"):
        find_head(model)


def test_timm_model_that_was_made_without_a_head() -> None:
    import timm

    with torch.device("meta"):
        model = timm.create_model("resnet18", num_classes=0)
    with pytest.raises(ValueError, match="ResNet has no classifying layer: it was made without"):
        find_head(model)
    assert replace_head(model, 3) == Head(["fc"], ["fc.weight", "fc.bias"])


class Resets(nn.Module):
    """A model whose own method makes the new layer in float32 on the CPU, as older ones of timm do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 9)

    def reset_classifier(self, num_classes: int) -> None:
        self.fc = nn.Linear(4, num_classes)


def test_own_reset_gets_device_and_dtype() -> None:
    model = Resets().to("meta", torch.float64)
    assert replace_head(model, 3) == Head(["fc"], ["fc.weight", "fc.bias"])
    assert (model.fc.weight.is_meta, model.fc.weight.dtype) == (True, torch.float64)


class Backbone(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.backbone = model
        self.num_classes = 1000

    def forward(self, x: Tensor) -> Any:
        return self.backbone(x)


def test_values_gradients_mode_and_attributes() -> None:
    """The frozen trunk computes what it did, the new head alone learns."""
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = Backbone(nn.Sequential(trunk, nn.Linear(4, 1000, bias=False).double()))
    model.requires_grad_(False).eval()
    x = torch.randn(2, 3, 8, 8)
    expected = trunk(x)
    head = replace_head(model, 5)
    assert head == Head(["backbone.1"], ["backbone.1.weight"])
    layer = model.backbone[1]
    assert (layer.weight.dtype, layer.bias, layer.training) == (torch.float64, None, False)
    assert model.num_classes == 5
    layer.float()
    output = model(x)
    torch.testing.assert_close(output, expected @ layer.weight.T)
    output.sum().backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {"backbone.1.weight"}


def test_seed_decides() -> None:
    weights = []
    for _ in range(2):
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        torch.manual_seed(3)
        replace_head(model, 2)
        weights.append(model[1].weight)
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    torch.manual_seed(3)
    torch.testing.assert_close(weights[0], nn.Linear(4, 2).weight, rtol=0, atol=0)


@pytest.mark.gpu
@needs_cuda
def test_device_follows_the_old_head() -> None:
    model = nn.Sequential(nn.Linear(4, 3)).to("cuda")
    replace_head(model, 2)
    assert model[0].weight.is_cuda


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.age = nn.Sequential(nn.Dropout(), nn.Linear(4, 100))
        self.sex = nn.Linear(4, 2)


def test_heads_of_several_tasks_are_not_guessed() -> None:
    model = Tasks()
    with pytest.raises(ValueError, match=r"'sex' may be the head, but so may 'age\.1': name"):
        replace_head(model, 3)
    assert replace_head(model, 3, head="age.1").layers == ["age.1"]
    assert (model.age[1].out_features, model.sex.out_features) == (3, 2)
    lists = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    with pytest.raises(ValueError, match="'1' may be the head, but so may '0'"):
        find_head(lists)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "no classifying .* such as: 0$"),
        (nn.Sequential(nn.Conv2d(3, 4, 1, stride=2)), "no classifying layer .* no Linear layer"),
        (nn.Sequential(nn.Conv2d(3, 4, 3)), "no classifying layer .* It has no Linear layer"),
        (nn.Sequential(nn.LazyLinear(3)), "'0' has no shape yet: run one batch"),
        (nn.ReLU(), "no classifying layer"),
    ],
)
def test_refused(model: nn.Module, message: str) -> None:
    for call in (find_head, lambda model: replace_head(model, 3)):
        with pytest.raises(ValueError, match=message):
            call(model)


def test_refused_settings() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="num_classes must be at least 1, got 0"):
        replace_head(model, 0)
    for name in ("0", "fc"):
        with pytest.raises(ValueError, match=f"'{name}' cannot be replaced as a head. .* as: 2"):
            replace_head(model, 2, head=name)
