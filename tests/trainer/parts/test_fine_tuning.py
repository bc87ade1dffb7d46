"""Frozen parts, rates by layer, and a teacher: what the trainer does with them."""

import copy
import json
import re
import shutil
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flambeau.data.sources.open_data import open_sources
from flambeau.errors import InputError
from flambeau.run.run import Run
from flambeau.trainer.fit import Training, fit, set_up
from flambeau.trainer.loss import AdaptedTeacher, SeveralTeachers
from flambeau.trainer.parts.auto_settings import resolve
from flambeau.trainer.parts.data import DataFacts, Prepared, datasets
from flambeau.trainer.parts.fine_tuning import weights_normalization
from flambeau.trainer.parts.model import build_model, normalizer
from flambeau.trainer.prediction.trained_model import Trained
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.tasks.multilabel import Multilabel
from flambeau.trainer.tasks.regression import Regression
from refused import refused

QUICK = "--epochs 2 --batch-size 4 --precision fp32 --warmup 0st --schedule constant"
MODEL = """
from torch import nn
def net(num_classes, channels):
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )
"""

ASKED: Any = {"device": torch.device("cpu"), "weight": 0.5, "temperature": 4.0}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model_file(images: Path) -> Path:
    path = images.parent / "net.py"
    path.write_text(MODEL, encoding="utf-8")
    return path


def prepared(images: Path, model_file: Path, folder: Path, **given: Any) -> Training:
    train, val = open_sources(images, seed=0)
    settings = Settings(
        data=str(images), model=f"{model_file}:net", precision="fp32", batch_size=4, duration="2ep",
        schedule="constant", warmup="0st", **given,
    )  # fmt: skip
    resolved, facts = resolve(settings, train, val)
    return set_up(Prepared(resolved, facts, train, val), folder=folder, bar=False)


def state_of(training: Training) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in training.model.state_dict().items()}


@pytest.mark.parametrize(
    ("freeze", "frozen"),
    [("backbone", ("0.", "1.", "3.", "4.")), ("0, 1", ("0.", "1.")), ("*.weight", ("weight",))],
)
def test_what_is_frozen_stays_to_the_bit(
    images: Path, model_file: Path, tmp_path: Path, freeze: str, frozen: tuple[str, ...]
) -> None:
    training = prepared(images, model_file, tmp_path / "run", freeze=freeze)
    before = state_of(training)
    fit(training)
    after = state_of(training)
    same = {name for name in before if torch.equal(before[name], after[name])}
    if freeze == "*.weight":
        assert {name for name in before if name.endswith("weight")} <= same
        assert "8.bias" not in same
        assert (
            "1.running_mean" not in same
        )  # its bias is trained: the layer is not frozen as a whole
    else:
        assert same == {name for name in before if name.startswith(frozen)}


def test_rates_by_layer_and_of_the_head(images: Path, model_file: Path, tmp_path: Path) -> None:
    training = prepared(
        images,
        model_file,
        tmp_path / "run",
        lr=0.08,
        layer_decay=0.5,
        head_lr=0.3,
        weight_decay=0.01,
    )
    rates = {
        name: (group["lr"], group["weight_decay"])
        for group in training.run.optimizer.param_groups
        for name, parameter in training.model.named_parameters()
        if any(parameter is p for p in group["params"])
    }
    # By hand: the Linear layer is the deepest, each convolution with its norm one below the other.
    assert rates == {
        "0.weight": (0.02, 0.01), "1.weight": (0.02, 0), "1.bias": (0.02, 0),
        "3.weight": (0.04, 0.01), "4.weight": (0.04, 0), "4.bias": (0.04, 0),
        "8.weight": (0.3, 0.01), "8.bias": (0.3, 0),
    }  # fmt: skip
    fit(training)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(row).get("learning_rate", 0.3) for row in rows} == {0.3}


def test_what_muon_leaves_has_an_optimizer_and_rates_of_its_own(
    images: Path, model_file: Path, tmp_path: Path
) -> None:
    training = prepared(
        images,
        model_file,
        tmp_path / "run",
        optimizer="muon",
        momentum=0.6,
        fixed_norm=True,
        lr=0.2,
        muon_others="sgd",
        muon_others_lr=0.03,
        head_lr=0.05,
        weight_decay=0.01,
    )
    found = {
        name: tuple(group[key] for key in ("muon", "others", "lr", "momentum", "weight_decay"))
        for group in training.run.optimizer.param_groups
        for name, parameter in training.model.named_parameters()
        if any(parameter is p for p in group["params"])
    }
    others = {"0.weight": 0.01, "1.weight": 0, "1.bias": 0, "4.weight": 0, "4.bias": 0}
    head = {"8.weight": 0.01, "8.bias": 0}
    assert found == {
        "3.weight": (True, "adamw", 0.2, 0.6, 0.01),
        **{name: (False, "sgd", 0.03, 0.9, decay) for name, decay in others.items()},
        **{name: (False, "sgd", 0.05, 0.9, decay) for name, decay in head.items()},
    }
    fit(training)


def test_the_command_says_what_is_trained(flambeau: Any, images: Path, model_file: Path) -> None:
    command = ("train", images, QUICK, f"--model {model_file}:net --freeze backbone --head-lr 0.1")
    code, _, err = flambeau(*command, "--out run")
    assert code == 0
    assert "348 of 366 parameters frozen, 18 trainable" in err
    assert re.search(r"^head +1 +16 +0\.1 +0\.0005 +8\.weight$", err, re.M)
    code, _, err = flambeau(
        "train", images, QUICK, f"--model {model_file}:net", "--out run --freeze 0"
    )
    assert code == 2
    assert "freeze: 'backbone' there, '0' now" in err


def test_starting_from_weights(
    flambeau: Any, images: Path, model_file: Path, tmp_path: Path, make_images: Any
) -> None:
    model = f"--model {model_file}:net"
    assert flambeau("train", images, QUICK, model, "--out first").code == 0
    first = safetensors.torch.load_file("first/model.safetensors")
    wrapped = {f"module.{name}": tensor for name, tensor in first.items()}
    torch.save({"state_dict": wrapped, "epoch": 3}, "first.pth")
    shutil.copytree(images, "three")  # one class more: another head
    for part in ("train", "val"):
        shutil.copytree(f"three/{part}/a", f"three/{part}/c")
    lightning = {f"model.{name}": tensor for name, tensor in first.items()}
    torch.save({"state_dict": lightning, "hyper_parameters": {"lr": 0.1}}, "epoch=3.ckpt")
    for weights in ("first", "first.pth", "first/model.safetensors", "epoch=3.ckpt"):
        out = tmp_path / f"from-{Path(weights).name}"
        training = prepared(Path("three"), model_file, out, weights=weights, freeze="backbone")
        training.run.close()
        state = training.model.state_dict()
        assert all(torch.equal(first[name], state[name]) for name in first if name[0] != "8")
        assert state["8.weight"].shape == (3, 8)
    command = ("train three", QUICK, model, "--weights first.pth --out again")
    code, _, err = flambeau(*command)
    assert code == 0
    assert "first.pth, key state_dict: " in err
    assert re.search(r"8\.weight +\[2, 8\] -> \[3, 8\]", err)
    assert "not taken" not in err
    averaged = {name: tensor.clone() for name, tensor in first.items()}
    both = {"state_dict": wrapped, "state_dict_ema": averaged}
    torch.save(both, "both.pth")
    code, _, err = flambeau("train three", QUICK, model, "--weights both.pth --out both")
    assert code == 0
    assert "both.pth, key state_dict: " in err
    assert "also there, and not taken: state_dict_ema (flambeau convert " in err
    assert "both.pth NEW --key state_dict_ema takes those)" in err
    Path("first.pth").unlink()  # a resume does not need it
    shutil.rmtree(sorted(Path("again/checkpoints").iterdir())[-1])
    Path("again/result.json").unlink()
    assert flambeau(*command).code == 0


def test_weights_of_a_run_see_images_normalized_as_in_that_run(
    flambeau: Any, images: Path, photos: Path, model_file: Path, tmp_path: Path
) -> None:
    model = f"--model {model_file}:net"
    assert flambeau("train", images, QUICK, model, "--out first").code == 0
    first = DataFacts.read(Path("first/dataset.json"))

    def normalized(weights: str, channels: int) -> tuple[list[float], list[float]]:
        train, val = open_sources(photos, seed=0)
        settings = Settings(
            data=str(photos), model=f"{model_file}:net", weights=weights, image_size=8, channels=channels,
        )  # fmt: skip
        facts = resolve(settings, train, val)[1]
        return facts.mean, facts.std

    learned = (first.mean, first.std)
    shutil.copy("first/model.safetensors", "alone.safetensors")
    by_the_photos = normalized("alone.safetensors", first.channels)
    assert by_the_photos != learned
    checkpoint = next(Path("first/checkpoints").iterdir())
    for weights in ("first", "first/model.safetensors", str(checkpoint)):
        assert normalized(weights, first.channels) == learned
    assert normalized("first", 3) == normalized("alone.safetensors", 3)  # it had one channel

    command = ("train", photos, QUICK, model, "--weights first --image-size 8", "--out second")
    more = f"--channels {first.channels}"
    code, _, err = flambeau(*command, more)
    assert code == 0, err
    shown = ", ".join(f"{one:.3g}" for one in first.mean)
    assert f"images are normalized as in that run: mean {shown}, standard deviation" in err
    second = DataFacts.read(Path("second/dataset.json"))
    assert (second.mean, second.std) == learned
    shutil.rmtree("first")  # a resume does not need it
    Path("second/result.json").unlink()
    shutil.rmtree(sorted(Path("second/checkpoints").iterdir())[-1])
    code, _, err = flambeau(*command, more)
    assert code == 0, err
    assert DataFacts.read(Path("second/dataset.json")).mean == first.mean


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.toml", "lr = 0.1"),
        ("config.toml", "lr: 0.1"),
        ("config.toml", 'preprocess = "imagenet"'),
        ("config.toml", "preprocess = {mean = 3}"),
        ("dataset.json", '{"name": "cats"}'),
        ("dataset.json", "{"),
    ],
)
def test_a_project_of_another_program_is_no_run(name: str, content: str) -> None:
    project = Path("project")
    (project / "checkpoints").mkdir(parents=True)
    (project / "config.toml").write_text("lr = 0.1")
    (project / name).write_text(content)
    weights = project / "checkpoints" / "best.pth"
    weights.write_bytes(b"")
    assert weights_normalization(str(weights), channels=3) is None


def test_weights_of_a_loop_of_ones_own_see_images_as_it_declared(
    images: Path, model_file: Path
) -> None:
    net = build_model(f"{model_file}:net", num_classes=2, channels=1, image_size=8)
    declared = {"image_size": 8, "mean": [0.25], "std": [0.5]}
    data = [(torch.zeros(1, 8, 8), 0)] * 2
    run = Run(
        "own", net, torch.optim.SGD(net.parameters(), 0.1), data, batch_size=2, duration="1st",
        builder=f"{model_file}:net", preprocess=declared, classes=["a", "b"],
    )  # fmt: skip
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(F.cross_entropy(run.model(x), y))
    train, val = open_sources(images, seed=0)
    settings = Settings(data=str(images), model=f"{model_file}:net", weights="own")
    facts = resolve(settings, train, val)[1]
    assert (facts.mean, facts.std) == ([0.25], [0.5])


def test_recomputing_gives_the_same_bits(images: Path, model_file: Path, tmp_path: Path) -> None:
    def kept(training: Training) -> int:
        """Values that one forward pass leaves for backward."""
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.append(tensor.numel()) or tensor,  # type: ignore[func-returns-value]
            lambda tensor: tensor,
        ):
            training.loss_of(
                torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.arange(4) % 2, step=0
            )
        return sum(sizes)

    ends, sizes = [], []
    for recompute in ("none", "1, 4"):
        training = prepared(images, model_file, tmp_path / recompute, recompute=recompute)
        fit(training)
        ends.append(state_of(training))
        sizes.append(kept(training))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert sizes[1] < sizes[0]


def test_stochastic_depth_reaches_the_model(images: Path, tmp_path: Path) -> None:
    build = partial(build_model, num_classes=2, channels=3, image_size=32, drop_path=0.25)
    rates = [m.drop_prob for m in build("resnet10t").modules() if type(m).__name__ == "DropPath"]
    assert max(rates) == 0.25
    rates = [
        m.p for m in build("torchvision:convnext_tiny").modules()
        if type(m).__name__ == "StochasticDepth"
    ]  # fmt: skip
    assert max(rates) == 0.25
    for name in ("small_convnet", "torchvision:vgg11", "vgg11"):
        with pytest.raises(InputError, match=rf"drop_path = 0\.25 has no effect: {name} has no"):
            build(name)


def test_the_least_share_of_a_crop(flambeau: Any, photos: Path, images: Path) -> None:
    def share(**given: Any) -> float:
        train, val = open_sources(photos, seed=0)
        settings, facts = resolve(Settings(data=str(photos), image_size=16, **given), train, val)
        return datasets(Prepared(settings, facts, train, val))[0].crop.scale[0]  # type: ignore[union-attr]

    assert (share(), share(crop_scale=0.08)) == (0.25, 0.08)
    code, _, err = flambeau("train", images, QUICK, "--crop-scale 0.5 --out run")
    assert code == 2
    assert "crop_scale has no effect on images that are all of 8 x 8" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--freeze backbone --layer-decay 0.5", ("layer_decay has no effect",)),
        ("--freeze 8 --head-lr 0.5", ("head_lr has no effect: the last layer is frozen",)),
        ("--freeze 2", ("freeze = '2' has no effect: nothing there is trained",)),
        ("--freeze 0,", ("there is an empty name in it",)),
        ("--weights nan.safetensors", ("'8.bias' holds NaN",)),
        ("--warmup 0", ("'0%' is none",)),
        ("--recompute nope", ("recompute = 'nope'", "matches no module")),
        ("--precision tf32 --device cpu", ("precision = 'tf32' is for NVIDIA GPUs",)),
        ("--weights gone.pth", ("gone.pth",)),
        (
            "--weights other.safetensors",
            ("other.safetensors", "0.0% of the model", "less than half: the model has '0.weight'"),
        ),
        ("--weights x --pretrained", ("contradict each other",)),
        ("--freeze 0,layer9", ("'layer9' matches no module",)),
        ("--freeze *", ("freeze = '*' leaves nothing to train",)),
        ("--head-lr 0", ("head_lr must be above 0",)),
        ("--layer-decay 1.5", ("layer_decay must be above 0 and at most 1",)),
        ("--temperature 2", ("temperature has no effect without a teacher",)),
        ("--teacher-weight 0.2", ("teacher_weight has no effect without a teacher",)),
        ("--teacher gone", ("gone' is not the folder of a finished run",)),
    ],
)
def test_refused(
    flambeau: Any, images: Path, model_file: Path, flags: str, words: tuple[str, ...]
) -> None:
    safetensors.torch.save_file({"body.weight": torch.ones(3)}, "other.safetensors")
    safetensors.torch.save_file({"8.bias": torch.tensor([1, torch.nan])}, "nan.safetensors")
    quick = QUICK.replace("--precision fp32", "") if "--precision" in flags else QUICK
    code, out, err = flambeau(
        "train", images, quick, f"--model {model_file}:net", flags, "--out run"
    )
    assert (code, out) == (2, "")
    assert all(word in err for word in words)
    assert not Path("run").exists()


class Colours(nn.Module):
    """Logits that depend on every pixel and on the size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.square().mean((2, 3)) + x.shape[-1])


def facts(classes: list[str], mean: float, channels: int = 3) -> DataFacts:
    means = [mean, 0.4, 0.5][:channels]
    return DataFacts(classes, channels, means, [0.2, 0.3, mean][:channels], 9, 9, "", "", None)


def trained(classes: list[str], size: int, mean: float = 0.3) -> Trained:
    torch.manual_seed(0)
    its, device = facts(classes, mean), torch.device("cpu")
    settings = Settings(image_size=size, precision="fp32", device="cpu")
    return Trained(Colours().eval(), settings, its, device, normalizer(its, device))


@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("mean", [0.3, 0.6])
@pytest.mark.parametrize("classes", [["a", "b", "c"], ["c", "a", "b"]])
def test_a_teacher_sees_the_images_as_it_was_trained(
    size: int, mean: float, classes: list[str]
) -> None:
    teacher, ours = trained(classes, size, mean), facts(["a", "b", "c"], 0.3)
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    asked = AdaptedTeacher(teacher, ours, **ASKED)
    got = asked(normalizer(ours, torch.device("cpu"))(images))
    seen = teacher.normalize(images)
    if size != 8:
        seen = F.interpolate(seen, (size, size), mode="bilinear", antialias=True)
    with torch.no_grad():
        logits = teacher.model(seen)
    expected = torch.stack([logits[:, classes.index(name)] for name in ("a", "b", "c")], 1)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert not got.requires_grad


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (facts(["a", "b"], 0.3), "knows 3 classes and these data have 2; only one of them has 'c'"),
        (facts(["a", "b", "d"], 0.3), "only one of them has 'c'"),
        (facts(["a", "b", "c"], 0.3, channels=1), "takes 3 channels and this model 1"),
    ],
)
def test_a_teacher_of_something_else_is_refused(ours: DataFacts, words: str) -> None:
    with pytest.raises(InputError, match=words):
        AdaptedTeacher(trained(["a", "b", "c"], 8), ours, **ASKED)


def test_several_teachers_teach_the_mean_of_their_probabilities() -> None:
    ours = facts(["a", "b", "c"], 0.3)
    one = AdaptedTeacher(trained(["a", "b", "c"], 8), ours, **ASKED)
    other = AdaptedTeacher(trained(["c", "a", "b"], 12, 0.2), ours, **ASKED)
    x = torch.randn(5, 3, 8, 8)
    temperature = one.temperature
    student = torch.randn(5, 3)
    mean = ((one(x) / temperature).softmax(1) + (other(x) / temperature).softmax(1)) / 2
    both = SeveralTeachers([one, other], ours.task)
    torch.testing.assert_close((both(x) / temperature).softmax(1), mean)
    own = (student / temperature).log_softmax(1)
    expected = F.kl_div(own, mean, reduction="batchmean") * temperature**2
    loss = ours.task.distillation_loss(student, both(x), temperature=temperature)
    torch.testing.assert_close(loss, expected)
    assert (both.weight, both.temperature) == (one.weight, one.temperature)


@pytest.mark.parametrize("task", ["labels", "numbers"])
def test_several_teachers_of_other_tasks(task: str) -> None:
    z = [torch.randn(4, 3) for _ in range(3)]
    teachers: list[Any] = [_Says(one) for one in z]
    kind: Any = {
        "labels": Multilabel(("a", "b", "c")),
        "numbers": Regression(("a", "b", "c"), mean=(0.0,) * 3, std=(1.0,) * 3),
    }[task]
    got = SeveralTeachers(teachers, kind)(torch.empty(0))
    if task == "labels":
        got, z = (got / 4).sigmoid(), [(one / 4).sigmoid() for one in z]
    torch.testing.assert_close(got, torch.stack(z).mean(0))


class _Says:
    weight = 0.5
    temperature = 4.0

    def __init__(self, outputs: torch.Tensor) -> None:
        self.outputs = outputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.outputs


def test_learning_from_several_runs_resumes_exactly(
    flambeau: Any, images: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = f"--model {model_file}:net"
    for name, seed in (("one", 1), ("two", 2)):
        assert flambeau("train", images, QUICK, model, f"--seed {seed} --out {name}").code == 0
    words = (images, QUICK, model, "--teacher one,two --checkpoint-every 1st")
    assert flambeau("train", *words, "--out whole").code == 0
    alone = ("train", images, QUICK, model, "--teacher one --out alone")
    assert flambeau(*alone).code == 0

    original = Run.step

    def step(self: Run, loss: torch.Tensor) -> None:
        if self.state.step == 1:
            raise KeyboardInterrupt
        original(self, loss)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", step)
        assert flambeau("train", *words, "--out stopped").code == 130
    assert flambeau("train", *words, "--out stopped").code == 0
    weights = [Path(run, "model.safetensors").read_bytes() for run in ("whole", "stopped", "alone")]
    assert weights[0] == weights[1] != weights[2]
    config = tomllib.loads(Path("whole/config.toml").read_text())
    assert config["teacher"] == f"{Path('one').resolve()},{Path('two').resolve()}"
    assert flambeau("export whole --allow-slower --out shipped").code == 0
    assert json.loads(Path("shipped/export.json").read_text())["settings"]["teacher"] == "one + two"
    assert flambeau("predict shipped", images / "val").code == 0

    refused(flambeau("train", *words, "--teacher two,one --out whole"), "teacher")
    twice = flambeau("train", images, QUICK, model, "--teacher one,one --out x")
    refused(twice, "teacher must name run folders once each")
    missing = flambeau("train", images, QUICK, model, "--teacher one,none --out x")
    refused(missing, "none", "is not the folder of a finished run")
    damaged = bytearray(Path("two/model.safetensors").read_bytes())
    damaged[-1] ^= 1
    Path("two/model.safetensors").write_bytes(damaged)
    refused(flambeau("train", *words, "--extend 1ep --out whole"), "have changed since")


def test_learning_from_a_run(flambeau: Any, images: Path, model_file: Path, tmp_path: Path) -> None:
    model = f"--model {model_file}:net"
    assert flambeau("train", images, QUICK, model, "--out teacher").code == 0
    settings: dict[str, Any] = {"teacher": "teacher", "temperature": 3.0, "teacher_weight": 0.25}
    training = prepared(
        images, model_file, tmp_path / "own", label_smoothing=0.0, seed=1, **settings
    )
    # The loss of one batch, by torch's own functions.
    student, teacher = copy.deepcopy(training.model), copy.deepcopy(training.model).eval()
    teacher.load_state_dict(safetensors.torch.load_file("teacher/model.safetensors"))
    pixels, targets = torch.randint(0, 256, (6, 1, 8, 8), dtype=torch.uint8), torch.arange(6) % 2
    x = training.normalize(pixels)
    own, theirs = student(x), teacher(x).detach()
    assert not torch.equal(own, theirs)
    soft = F.kl_div((own / 3).log_softmax(1), (theirs / 3).softmax(1), reduction="batchmean") * 9
    expected = 0.75 * F.cross_entropy(own, targets) + 0.25 * soft
    loss = training.loss_of(pixels, targets, step=0)
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(loss, list(training.model.parameters()))
    torch.testing.assert_close(
        list(gradients), list(torch.autograd.grad(expected, list(student.parameters())))
    )
    fit(training)

    # Stopped and gone on with: the same bits; with other weights in the teacher's folder: refused.
    command = ("train", images, QUICK, model, "--teacher teacher --seed 1")
    assert flambeau(*command, "--out whole").code == 0
    shutil.copytree("whole", "cut")
    for name in ("result.json", "model.safetensors"):
        Path("cut", name).unlink()
    shutil.rmtree("cut/checkpoints/step-00000008")
    assert flambeau(*command, "--out cut").code == 0
    weights = Path("whole/model.safetensors").read_bytes()
    assert Path("cut/model.safetensors").read_bytes() == weights
    shutil.copy("whole/model.safetensors", "teacher/model.safetensors")
    shutil.rmtree("cut/checkpoints/step-00000008")
    Path("cut/result.json").unlink()
    code, _, err = flambeau(*command, "--out cut")
    assert code == 2
    assert "teacher have changed since the run was started" in err
