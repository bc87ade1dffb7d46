import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.models.freezing import count_frozen, freeze, unfreeze, unfreeze_gradually


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def x() -> Tensor:
    return torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(1))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in model.state_dict().items() if not value.equal(before[name])}


def trainable(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Two epochs as everybody writes them."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        model(x()).square().sum().backward()
        optimizer.step()
        model.eval()
        model(x())


ALL = set(make().state_dict())


def under(*prefixes: str) -> set[str]:
    return {name for name in ALL if name.startswith(prefixes)}


def test_frozen_parts_stay_to_the_bit() -> None:
    """Without it, running statistics and num_batches_tracked drift in train()."""
    model = make()
    before = state(model)
    freeze(model, ["stem", "layer1"])
    train(model)
    assert changed(model, before) == under("layer2", "fc")


def test_a_norm_in_the_head_stays_whole() -> None:
    """As in levit's head: by its name, by all of its parameters, but not by one of them (BitFit)."""
    names = [name for name, _ in make().layer2.named_parameters(prefix="layer2")]
    for but in (["layer2"], names):
        model = make()
        freeze(model, ["*"], but=but)
        assert [model.train().layer2[1].training, model.stem[1].training] == [True, False]
    freeze(model, ["*"], but=["*.bias"])
    assert not model.train().layer2[1].training


def test_requires_grad_alone_lets_statistics_drift() -> None:
    """What snippets do; shows that the test above can fail."""
    model = make()
    before = state(model)
    model.stem.requires_grad_(False)
    train(model)
    assert {"stem.1.running_mean", "stem.1.num_batches_tracked"} <= changed(model, before)


def test_all_but_the_head() -> None:
    model = make()
    before = state(model)
    counts = freeze(model, ["*"], but=["fc"])
    train(model)
    assert changed(model, before) == {"fc.weight", "fc.bias"}
    head = sum(p.numel() for p in model.fc.parameters())
    rest = sum(p.numel() for p in model.parameters()) - head
    assert counts == (rest, head, 3) == count_frozen(model)
    assert str(counts) == (
        "424 of 434 parameters frozen, 10 trainable; running statistics of 3 norm layers frozen"
    )


@pytest.mark.parametrize(
    ("patterns", "frozen", "num_norms"),
    [
        (["layer1"], {"layer1.0.weight", "layer1.0.bias"}, 1),
        (["layer*"], {f"layer{i}.{n}" for i, n in [(1, "0.weight"), (1, "0.bias"), (2, "0.weight"),
                                                  (2, "0.bias"), (2, "1.weight"), (2, "1.bias")]}, 2),
        (["stem.1"], {"stem.1.weight", "stem.1.bias"}, 1),
        (["stem.1.*"], {"stem.1.weight", "stem.1.bias"}, 1),  # both of its parameters by name
        (["stem.1.bias"], {"stem.1.bias"}, 0),
        (["stem.1.bias", "stem.1.weight"], {"stem.1.weight", "stem.1.bias"}, 1),
        (["*.1"], {"stem.1.weight", "stem.1.bias", "layer2.1.weight", "layer2.1.bias"}, 3),
        (["fc.w*"], {"fc.weight"}, 0),
        ([], set(), 0),
    ],
)  # fmt: skip
def test_patterns(patterns: list[str], frozen: set[str], num_norms: int) -> None:
    model = make()
    counts = freeze(model, patterns)
    assert trainable(model) == trainable(make()) - frozen
    assert counts.num_norms == num_norms
    model.train()
    norms = [model.stem[1], model.layer1[1], model.layer2[1]]
    assert sum(not norm.training for norm in norms) == num_norms
    assert model.layer2[2].training  # dropout


def test_output_is_that_of_torchvisions_frozen_batchnorm() -> None:
    from torchvision.ops import FrozenBatchNorm2d

    model = make()
    model(x())  # statistics that are not 0 and 1
    freeze(model, ["stem"])
    model.train()
    theirs = FrozenBatchNorm2d(4)
    theirs.load_state_dict(model.stem[1].state_dict())
    conv = model.stem[0](x())
    torch.testing.assert_close(model.stem[1](conv), theirs(conv))


def saved_bytes(model: nn.Module) -> int:
    """What the graph keeps for the backward pass, without the parameters."""
    own = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x())
    del output
    return sum(kept.values())


def test_frozen_front_keeps_nothing_for_backward() -> None:
    """Only the input of the head, 4 samples of 4 features, stays."""
    model = make()
    whole = saved_bytes(model)
    freeze(model, ["*"], but=["fc"])
    assert saved_bytes(model) == 4 * 4 * 4
    assert whole > 100 * 4 * 4 * 4


def test_unfreeze_gives_everything_back() -> None:
    model = make().train()
    freeze(model, ["*"])
    assert unfreeze(model, ["*"]) == count_frozen(make())
    fresh = make().train()
    for each in (model, fresh):
        torch.manual_seed(0)  # of the dropout
        train(each)
    assert changed(model, state(fresh)) == set()
    assert [m.training for m in model.modules()] == [m.training for m in fresh.modules()]


def test_unfreeze_a_part() -> None:
    model = make()
    freeze(model, ["*"])
    unfreeze(model, ["layer2", "fc"])
    before = state(model)
    train(model)
    assert changed(model, before) == under("layer2", "fc")
    unfreeze(model, ["stem.1.bias"])  # makes the norm a trained one
    assert model.train().stem[1].training


def test_copies_and_files_stay_frozen() -> None:
    model = make()
    freeze(model, ["stem"])
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ):
        other.train()
        assert not other.stem[1].training
        assert other.layer2[1].training
        unfreeze(other, ["stem"])
        assert other.train().stem[1].training  # a copy does not hold on to the original
    assert not model.train().stem[1].training
    assert set(model.state_dict()) == ALL
    make().load_state_dict(model.state_dict())


def test_no_optimizer_applies_an_old_gradient() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    model(x()).sum().backward()
    freeze(model, ["fc"])
    before = state(model)
    optimizer.step()
    assert changed(model, before) & under("fc") == set()


def test_gradually() -> None:
    """The optimizer has all parameters from the start; a run that begins at epoch 4 agrees."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    stages = ["stem", "layer1", "layer2"]
    trained = [("fc",), ("fc",), ("layer2", "fc"), ("layer2", "fc"), ("layer1", "layer2", "fc")]
    for epoch, names in enumerate(trained):
        counts = unfreeze_gradually(model, stages, epoch=epoch, every=2)
        before = state(model)
        train(model, optimizer)
        assert changed(model, before) == under(*names)
    assert unfreeze_gradually(make(), stages, epoch=4, every=2) == counts
    assert unfreeze_gradually(model, stages, epoch=99).num_frozen == 0


def test_tied_weights_and_integers() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    model["codes"] = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.int8), False)])
    assert freeze(model, ["head"]).num_frozen == 17
    assert not model["embed"].weight.requires_grad
    assert unfreeze(model, ["*"]).num_frozen == 2


def test_meta_and_half() -> None:
    with torch.device("meta"):
        model = Net()
    assert freeze(model.to(torch.bfloat16), ["*"]).num_trainable == 0


def test_refused() -> None:
    model = make()
    message = r"'layr1\.\*' matches no module and no parameter .* nearest names are 'layer1', .*; its parts"
    for call in (freeze, unfreeze):
        with pytest.raises(ValueError, match=message):
            call(model, ["stem", "layr1.*"])
        with pytest.raises(TypeError, match=r"got one string: \['stem'\]"):
            call(model, "stem")
    with pytest.raises(ValueError, match="'Fc' matches no module"):
        freeze(model, ["*"], but=["Fc"])
    with pytest.raises(ValueError, match="'nets' matches no"):
        unfreeze_gradually(model, ["stem", "nets"], epoch=0)
    for epoch, every in [(-1, 1), (0, 0)]:
        with pytest.raises(ValueError, match="epoch must be at least 0 and every at least 1"):
            unfreeze_gradually(model, ["stem"], epoch=epoch, every=every)
    assert count_frozen(model).num_frozen == 0
