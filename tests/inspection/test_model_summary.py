"""The summary of a model, against torch's own counters and against what is countable by hand."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flambeau.errors import InputError
from flambeau.inspection.model_summary import ModelSummary, ModuleSummary, summarize

ROOT = Path(__file__).parents[2]
TIMM = (ROOT / "bench" / "timm_families.txt").read_text().split()
TORCHVISION = [
    f"torchvision:{name}" for name in torchvision.models.list_models(module=torchvision.models)
]
ONE_OF_EACH = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet",
    "inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf",
    "regnet_y_400mf", "resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "swin_t",
    "swin_v2_t", "vgg11", "vgg11_bn", "vit_b_16", "wide_resnet50_2",
)  # fmt: skip
"""Of torchvision's families: the others repeat the same modules, and bench/model_counters.py counts all."""
TRIED = [*TIMM, *(f"torchvision:{name}" for name in ONE_OF_EACH)]
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
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TRIED],
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
    assert set(TRIED) <= {*TIMM, *TORCHVISION}
    families = {re.split(r"[\d_]", name)[0] for name in TORCHVISION}
    assert {re.split(r"[\d_]", name)[0] for name in TRIED[len(TIMM) :]} == families


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
    # ... and their initialization is no part of the forward pass.
    plain = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    expected = summarize(plain, (torch.empty(1, 2, 6, 6),)).modules
    for lazy, usual in zip(summary.modules, expected, strict=True):
        assert lazy == dataclasses.replace(usual, kind=lazy.kind)


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


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_count_whatever_computes_them(kind: type[nn.RNNBase]) -> None:
    layer, x = kind(8, 16, 2, batch_first=True, bidirectional=True), torch.zeros(2, 7, 8)
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        layer(x)
    assert summarize(layer, (x,)).modules[0].flops == counter.get_total_flops() > 0


class Numpy(nn.Module):
    """Leaves torch in between, which tensors without values cannot do."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.from_numpy(x.detach().numpy().T.copy())


def test_values_are_there_where_the_model_leaves_torch() -> None:
    summary = summarize(Numpy(), (torch.empty(3, 4, device="meta"),))
    assert summary.ran
    assert summary.modules[0].output == ((3, 3),)


@pytest.mark.skipif(torch.cuda.is_available(), reason="no fork after a backward pass with a GPU")
@pytest.mark.parametrize(
    "look",
    [
        "summarize(model, inputs)",
        pytest.param("estimate_memory(model, inputs)", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_looked_can_train_and_then_fork_ranks(look: str, run_python: Any) -> None:
    code = f"""
import os, torch
from flambeau.inspection.model_summary import summarize
from flambeau.recipes.memory.memory_budget import estimate_memory
model, inputs = torch.nn.Linear(2, 2), (torch.ones(1, 2),)
{look}
model(*inputs).sum().backward()
pid = os.fork()
if not pid:
    model(*inputs).sum().backward()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = run_python("-c", code)
    assert done.stdout.strip() == "7", done.stderr


def test_a_wrong_input_is_named() -> None:
    with pytest.raises(
        InputError, match=r"Linear does not take \(float32 \(2, 5\)\): RuntimeError: .*5"
    ):
        summarize(nn.Linear(4, 4), (torch.empty(2, 5),))
    with pytest.raises(InputError, match=r"Linear does not take \(\): TypeError"):
        summarize(nn.Linear(4, 4))
