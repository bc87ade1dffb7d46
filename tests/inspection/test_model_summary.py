"""The summary of a model, against torch's own counters and against what is countable by hand."""

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flambeau.errors import InputError
from flambeau.inspection.model_summary import ModelSummary, ModuleSummary, summarize

# Each of another family, of timm.
TIMM = [
    "resnet50", "resnetv2_50", "resnest14d", "res2net50_26w_4s", "regnetx_002", "regnety_002",
    "regnetz_005", "efficientnet_b0", "tf_efficientnetv2_b0", "mobilenetv3_small_100",
    "mobilenetv4_conv_small", "mnasnet_small", "ghostnet_100", "mobileone_s0", "repvgg_a0", "convnext_atto",
    "convnextv2_atto", "densenet121", "dla34", "dpn48b", "hrnet_w18_small", "inception_v4", "xception41",
    "nfnet_l0", "ese_vovnet19b_dw", "vgg11", "cspresnet50", "selecsls42", "skresnet18", "fbnetc_100",
    "hardcorenas_a", "rexnet_100", "tinynet_a", "semnasnet_075", "vit_tiny_patch16_224",
    "deit_tiny_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224", "cait_xxs24_224",
    "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "mixer_s16_224", "gmlp_ti16_224",
    "levit_128s", "poolformer_s12", "pvt_v2_b0", "xcit_nano_12_p16_224", "coatnet_0_224",
    "edgenext_xx_small", "crossvit_tiny_240",
]  # fmt: skip
TORCHVISION = [
    f"torchvision:{name}" for name in torchvision.models.list_models(module=torchvision.models)
]
QUICK = {
    "resnet50",
    "vit_tiny_patch16_224",
    "crossvit_tiny_240",
    "torchvision:vit_b_16",
    "torchvision:swin_t",
}


def row(summary: ModelSummary, name: str) -> ModuleSummary:
    (found,) = (row for row in summary.modules if row.name == name)
    return found


@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TIMM + TORCHVISION],
)
def test_figures_of_known_models(name: str) -> None:
    published = None if name in TORCHVISION else timm.get_pretrained_cfg(name)
    side = 224 if published is None else published.input_size[-1]
    image = torch.empty(1, 3, side, side, device="meta")
    # RegNets of torchvision read values while they are made.
    with torch.device("cpu" if "torchvision:regnet" in name else "meta"):
        known = name.removeprefix("torchvision:")
        model = timm.create_model(name) if published else torchvision.models.get_model(known)
    model.eval()
    whole = summarize(model, (image,)).modules[0]
    with FlopCounterMode(display=False) as counter:
        model.to("meta")(image)
    assert whole.flops == counter.get_total_flops() > 0
    assert whole.parameters == sum({id(p): p.numel() for p in model.parameters()}.values())
    assert whole.buffers == sum(b.numel() for b in model.buffers())


def test_there_are_as_many_as_promised() -> None:
    assert len(TIMM) == len(set(TIMM)) == 50
    assert len(TORCHVISION) == 80


class Mixed(nn.Module):
    """Two inputs, one by name, a layer used twice, one never, tied weights, a branch on a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.twice = nn.Linear(8, 8)
        self.alias = self.twice
        self.never = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.attention.in_proj_weight.requires_grad_(False)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, ids: Tensor, *, extra: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.embed(ids) * self.scale
        x = self.twice(self.alias(x) + extra["bias"])
        if x.shape[1] > 3:
            x = self.attention(x, x, x, need_weights=False)[0]
        return {"logits": self.head(x), "length": torch.tensor(float(x.shape[1]))}


@pytest.fixture(scope="module")
def mixed() -> ModelSummary:
    model = Mixed()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    extra = {"bias": torch.zeros(2, 5, 8)}
    found = summarize(model, (torch.zeros(2, 5, dtype=torch.int64),), {"extra": extra})
    assert model.training
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    return found


def test_shared_and_unused_parts(mixed: ModelSummary) -> None:
    assert mixed.shared[0] == ("embed.weight", "head.weight")
    assert mixed.unused == ("never",)  # attention reads its last layer without a call
    assert row(mixed, "alias").same_as == "twice"
    assert row(mixed, "twice").calls == row(mixed, "alias").calls == 2
    assert row(mixed, "").parameters == 400 + 72 + 72 + 4 * 72
    assert row(mixed, "").trainable == row(mixed, "").parameters - 3 * 64
    assert row(mixed, "").buffers == 8
    assert not mixed.ran


def test_figures_that_can_be_counted_by_hand(mixed: ModelSummary) -> None:
    assert row(mixed, "").output == ((2, 5, 50), ())
    assert row(mixed, "head").output == ((2, 5, 50),)
    assert row(mixed, "head").flops == 2 * 10 * 8 * 50
    assert row(mixed, "twice").flops == 2 * (2 * 10 * 8 * 8)
    projections, products = 4 * 2 * 10 * 8 * 8, 2 * 2 * (2 * 2 * 5 * 5 * 4)
    assert row(mixed, "attention").flops == projections + products
    # Reads ids and table, writes (2, 5, 8) float32.
    assert row(mixed, "embed").accessed_bytes == 10 * 8 + 400 * 4 + 80 * 4


def test_what_is_kept_for_the_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    summary = summarize(model, (torch.empty(4, 16),))
    assert [r.kept_bytes for r in summary.modules] == [2 * 4 * 32 * 4, 0, 4 * 32 * 4, 0, 4 * 32 * 4]


def test_lazy_layers_get_their_sizes() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(5))
    summary = summarize(model, (torch.empty(1, 2, 6, 6),))
    assert summary.modules[0].parameters == 4 * 2 * 9 + 4 + 5 * 64 + 5
    assert summary.modules[0].output == ((1, 5),)
    assert isinstance(model[2], nn.LazyLinear)


class Reads(nn.Module):
    """Control flow by values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x) if x.sum().item() > -1e9 else self.first(x)


def test_values_are_there_where_the_model_reads_them() -> None:
    summary = summarize(Reads(), (torch.empty(3, 4, device="meta"),))
    assert summary.ran
    assert summary.modules[0].output == ((3, 8),)
    assert summary.unused == ("first",)
    with torch.device("meta"), pytest.raises(InputError, match="reads values of its tensors"):
        summarize(Reads(), (torch.empty(3, 4),))


def test_a_wrong_input_is_named() -> None:
    with pytest.raises(
        InputError, match=r"Linear does not take \(float32 \(2, 5\)\): RuntimeError: .*5"
    ):
        summarize(nn.Linear(4, 4), (torch.empty(2, 5),))
    with pytest.raises(InputError, match=r"Linear does not take \(\): TypeError"):
        summarize(nn.Linear(4, 4))
