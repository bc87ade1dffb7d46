from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.checkpoints.partial_loading import (
    grey_filters,
    load_partial,
    resampled_positions,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def make(num_classes: int = 3, channels: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    trunk = [nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*trunk, nn.Linear(4, num_classes))


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_all_of_it_is_load_state_dict() -> None:
    state = copies(make(seed=1))
    state["1.running_mean"] += 5
    model, theirs = make(), make()
    report = load_partial(model, state)
    theirs.load_state_dict(state)
    equal(dict(model.state_dict()), dict(theirs.state_dict()))
    assert report.matched == {name: name for name in state}
    assert report.share == 1
    assert str(report) == "100.0% of the model loaded: 9 tensors as they were"


def test_another_number_of_classes() -> None:
    """`strict=False` raises here, on the shapes; the two shapes are in the report."""
    state = copies(make(num_classes=1000))
    model = make(seed=1)
    before = copies(model)
    with pytest.raises(RuntimeError, match="size mismatch"):
        make().load_state_dict(state, strict=False)
    del state["1.running_var"]
    report = load_partial(model, {**state, "aux.weight": torch.ones(1)})
    for name, value in model.state_dict().items():
        equal(value, before[name] if name[0] == "4" or name == "1.running_var" else state[name])
    assert report.mismatched == {"4.weight": "[1000, 4] -> [3, 4]", "4.bias": "[1000] -> [3]"}
    assert report.missing == ["1.running_var"]
    assert report.unexpected == ["aux.weight"]
    total = sum(value.numel() for value in before.values())
    assert report.share == pytest.approx(1 - (12 + 3 + 4) / total)
    assert str(report).splitlines() == [
        "86.8% of the model loaded: 6 tensors as they were",
        "left alone, other shape (2):",
        "  4.weight  [1000, 4] -> [3, 4]",
        "  4.bias    [1000] -> [3]",
        "missing, initial values (1):",
        "  1.running_var",
        "unexpected, not used (1):",
        "  aux.weight",
    ]


def test_rename() -> None:
    state = copies(make(seed=1))
    wrapped = {f"net.{name}": value for name, value in state.items() if name[0] != "4"}
    wrapped |= {"net.fc.weight": state["4.weight"], "net.fc.bias": state["4.bias"]}
    model = make()
    report = load_partial(model, wrapped, rename={"net": "", "net.fc": "4"})
    equal(dict(model.state_dict()), state)
    assert report.matched["4.bias"] == "net.fc.bias"
    outer = nn.ModuleDict({"backbone": make()})
    load_partial(outer, state, rename={"": "backbone"})
    equal(dict(outer["backbone"].state_dict()), state)
    # Whole parts of a name only: 'net' is no prefix of 'network.0.bias'.
    more = {**wrapped, "network.0.bias": torch.ones(4)}
    assert load_partial(make(), more, rename={"net.fc": "4", "net": ""}).unexpected == [
        "network.0.bias"
    ]


def test_dtype_is_the_models_and_reported() -> None:
    state = {name: value.half() for name, value in make(seed=1).state_dict().items()}
    model = make().double()
    report = load_partial(model, state)
    assert model[0].weight.dtype == torch.float64
    equal(model[0].weight.detach(), state["0.weight"].double())
    assert report.converted["0.weight"] == "torch.float16 -> torch.float64"
    assert report.converted["1.num_batches_tracked"] == "torch.float16 -> torch.int64"
    assert "other dtype (9):" in str(report)


@pytest.mark.gpu
@needs_cuda
def test_device_is_the_models() -> None:
    model = make().to("cuda")
    load_partial(model, copies(make(seed=1)))
    equal(model[0].weight.detach().cpu(), make(seed=1)[0].weight.detach())


def test_tied_weights_saved_under_one_name_are_not_missing() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    report = load_partial(model, {"embed.weight": torch.ones(5, 3)})
    assert (report.missing, report.share) == ([], 1.0)
    equal(model["head"].weight.detach(), torch.ones(5, 3))
    assert model["head"].weight is model["embed"].weight


def test_gradients_flow_after_loading() -> None:
    model = make()
    report = load_partial(model, {n: v.requires_grad_(v.is_floating_point()) for n, v in
                                  copies(make(seed=1)).items()})  # fmt: skip
    model(torch.ones(2, 3, 8, 8)).sum().backward()
    assert report.share == 1
    assert all(p.is_leaf and p.grad is not None for p in model.parameters())


def test_grey_filters_give_what_the_grey_image_gave_in_colour() -> None:
    colour, grey = make(seed=1).eval(), make(channels=1).eval()
    report = load_partial(grey, copies(colour), resize={"0.weight": grey_filters})
    assert report.resized == {"0.weight": "[4, 3, 3, 3] -> [4, 1, 3, 3] by grey_filters"}
    assert "0.weight" not in report.matched
    image = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(grey(image), colour(image.expand(2, 3, 8, 8)))
    assert grey_filters(torch.ones(4, 3, 3, 3), torch.Size([4, 1, 5, 5])) is None
    assert grey_filters(torch.ones(4), torch.Size([1])) is None


@pytest.mark.parametrize("num_front", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_as_timm_resamples_them(num_front: int, dtype: torch.dtype) -> None:
    from timm.layers import resample_abs_pos_embed

    torch.manual_seed(0)
    value = torch.randn(1, num_front + 36, 8, dtype=dtype)
    for side in (3, 10):
        got = resampled_positions(value, torch.Size([1, num_front + side**2, 8]))
        theirs = resample_abs_pos_embed(value, [side, side], num_prefix_tokens=num_front)
        torch.testing.assert_close(got, theirs)


def test_positions_that_are_no_square_are_left() -> None:
    value = torch.ones(1, 37, 8)
    for shape in [(1, 48, 8), (1, 10, 4), (10, 8)]:
        assert resampled_positions(value, torch.Size(shape)) is None
    model = nn.Module()
    model.positions = nn.Parameter(torch.zeros(1, 48, 8))
    model.rest = nn.Parameter(torch.zeros(1, 48, 8))
    state = {"positions": value, "rest": torch.ones(1, 48, 8)}
    report = load_partial(model, state, resize={"positions": resampled_positions})
    assert report.mismatched == {"positions": "[1, 37, 8] -> [1, 48, 8]"}


@pytest.mark.parametrize(
    ("state", "settings", "error", "message"),
    [
        ({f"module.{n}": v for n, v in make().state_dict().items()}, {}, ValueError,
         r"0\.0% of the model .* has '0\.weight', '0\.bias' and 7 more, the state dict 'module\.0"),
        ({}, {"min_share": 1e-9}, ValueError, "0.0% .* the state dict nothing"),
        ({}, {"min_share": 0.0}, ValueError, r"min_share must be in \(0, 1\], got 0"),
        ({}, {"min_share": 50}, ValueError, "got 50"),
        ({"0.weight": torch.ones(2, 3, device="meta")}, {}, ValueError, "on meta"),
        ({"4.bias": torch.ones(3)}, {}, ValueError, r"2\.\d% .* less than min_share=0\.5"),
        ({"state_dict": {}, "epoch": 3}, {}, TypeError, "'state_dict' is a dict, not a tensor"),
        (copies(make()), {"rename": {"nat": ""}}, ValueError, "rename: no name .* by 'nat'"),
        ({"a.0.bias": torch.ones(4), "0.bias": torch.ones(4)}, {"rename": {"a": ""}}, ValueError,
         r"rename: 'a\.0\.bias' and '0\.bias' both become '0\.bias'"),
        (copies(make()), {"resize": {"conv": grey_filters}}, ValueError, "no tensor 'conv'"),
        (copies(make(9)), {"resize": {"4.bias": lambda value, shape: value}}, ValueError,
         r"resize: '4\.bias' is to be \[3\], got \[9\]"),
    ],
)  # fmt: skip
def test_refused_and_unchanged(
    state: dict[str, Any], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    model = make(seed=2)
    with pytest.raises(error, match=message):
        load_partial(model, state, **settings)
    equal(dict(model.state_dict()), copies(make(seed=2)))


def test_meta_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="on meta, without values"):
        load_partial(model, nn.Linear(2, 2).state_dict())


def test_what_overflows_in_the_dtype_of_the_model_is_named() -> None:
    model = nn.Linear(3, 1).half()
    state = {"weight": torch.tensor([[1.0, 1e6, -float("inf")]]), "bias": torch.tensor([65504.0])}
    report = load_partial(model, state)
    assert report.converted == {
        "weight": "torch.float32 -> torch.float16, 1 values beyond its range become infinite",
        "bias": "torch.float32 -> torch.float16",
    }
    assert "1 values beyond its range become infinite" in str(report)
