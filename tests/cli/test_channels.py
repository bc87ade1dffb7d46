"""Images of 2, 4 and more channels, of 8 and 16 bits, from data to training, predictions and exports."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file

import flambeau as doors
from flambeau.compare.sample_difference import sample_difference
from flambeau.data.sources.open_data import open_source
from flambeau.run.run import Run
from refused import refused

SIDES = 40, 44
SHORT = (
    "--epochs 6 --batch-size 8 --model tiny_convnet --precision fp32 --image-size 32 --log-every 1"
)
COUNT = 40


def bands(channels: int, low: int = 1000, spread: int = 50) -> NDArray[np.uint16]:
    """Noise, and in the last channel of every other image a square that is four deviations brighter."""
    rng = np.random.default_rng(0)
    x_NHWC = low + rng.normal(0, spread, (COUNT, *SIDES, channels))
    x_NHWC += 10 * np.arange(channels)
    x_NHWC[1::2, 8:28, 8:28, -1] += 4 * spread
    return x_NHWC.round().astype(np.uint16)


def write(folder: str, x_NHWC: NDArray[Any], **settings: Any) -> None:
    tifffile = pytest.importorskip("tifffile")
    stored = {"photometric": "minisblack", "metadata": None}
    if x_NHWC.ndim == 4:
        stored["planarconfig"] = "contig"
    settings = stored | settings
    for number, x_HWC in enumerate(x_NHWC):
        path = Path(folder, "ab"[number % 2], f"{number:02}.tif")
        path.parent.mkdir(parents=True, exist_ok=True)
        if settings.get("planarconfig") == "separate":
            x_HWC = np.ascontiguousarray(np.moveaxis(x_HWC, 2, 0))  # noqa: PLW2901 - the same image
        tifffile.imwrite(path, x_HWC, **settings)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def facts_of(run: str = "run") -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(Path(run, "dataset.json").read_text())
    return facts


def store(folder: str, driver: str, arrays: dict[str, NDArray[Any]]) -> None:
    ts = pytest.importorskip("tensorstore")
    for name, array in arrays.items():
        # N5 lists the first axis last.
        data = array.T if driver == "n5" else array
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{folder}/{name}"}}
        opened = ts.open(spec, create=True, dtype=str(data.dtype), shape=data.shape).result()
        opened.write(data).result()


OWN = """
import numpy as np, torch
class Own:
    classes = ['a', 'b']
    images = np.load('a.npy')
    targets = [k % 2 for k in range(len(images))]
    def __len__(self):
        return len(self.targets)
    def __getitem__(self, k):
        return MADE, self.targets[k]
def data():
    return Own(), Own()
"""


def make(data: str, x_NHWC: NDArray[np.uint16]) -> None:
    """Write the data of a name."""
    labels = np.arange(len(x_NHWC)) % 2
    x_NCHW = np.ascontiguousarray(np.moveaxis(x_NHWC, 3, 1))
    if data == "chunky":
        write(data, x_NHWC)
    elif data == "planes":
        write(data, x_NHWC, planarconfig="separate")
    elif data == "last.npz":
        np.savez(data, images=x_NHWC, labels=labels)
    elif data == "first.npz":
        np.savez(data, images=x_NCHW, labels=labels)
    elif data.endswith(("n5", "zarr")):
        Path(data).mkdir()
        driver = "n5" if data.endswith("n5") else "zarr"
        store(data, driver, {"images": x_NCHW, "labels": labels.astype(np.int64)})
    else:
        np.save("a.npy", x_NHWC)
        made = {
            "array.py:data": "self.images[k]",
            "tensor.py:data": "torch.from_numpy(self.images[k]).permute(2, 0, 1)",
        }[data]
        Path(data.partition(":")[0]).write_text(OWN.replace("MADE", made))


@pytest.mark.parametrize(
    "data",
    [
        "chunky", "planes", "last.npz", "first.npz", "a.n5", "a.zarr", "array.py:data", "tensor.py:data",
    ],
)  # fmt: skip
def test_six_channels_of_16_bits_are_learned(flambeau: Any, data: str) -> None:
    x_NHWC = bands(6)
    make(data, x_NHWC)
    trained = flambeau(f"train {data} --out run", SHORT)
    assert trained.code == 0, trained.err
    said = trained.out + trained.err
    assert "images of 6 channels and 16 bits, with all their levels" in said
    assert "channels 1, 2 and 3 of 6" in said
    facts = facts_of()
    assert (facts["pixels"], facts["channels"]) == ("uint16", 6)
    held_out = 0 if data.endswith(":data") else 2 * round(0.1 * COUNT / 2)
    assert facts["train_samples"] == COUNT - held_out
    # Of each channel its own, from the training images, to the precision of a few of them held out.
    np.testing.assert_allclose(facts["mean"], x_NHWC.mean((0, 1, 2)), rtol=0.01)
    np.testing.assert_allclose(facts["std"], x_NHWC.std((0, 1, 2)), rtol=0.05)
    answer = flambeau(f"evaluate run {data} --all --json")
    assert json.loads(answer.out)["accuracy"] > 0.95
    assert "scale" not in answer.err


def test_statistics_are_those_of_numpy(flambeau: Any) -> None:
    write("eight", (bands(4) // 8).astype(np.uint8))
    Path("eight/train").mkdir()
    for name in "ab":
        Path("eight", name).rename(Path("eight/train", name))
    write("eight/val", (bands(4) // 8).astype(np.uint8)[:4])
    assert flambeau("train eight --out run", SHORT, "--epochs 1").code == 0
    x = (bands(4) // 8).astype(np.uint8) / 255
    facts = facts_of()
    assert facts["pixels"] == "uint8"
    np.testing.assert_allclose(facts["mean"], x.mean((0, 1, 2)), atol=1e-4)
    np.testing.assert_allclose(facts["std"], x.std((0, 1, 2)), atol=1e-4)


def test_all_commands_take_a_run_of_four_channels(flambeau: Any) -> None:
    write("data", bands(4), compression=None)
    assert "Nothing was found" in flambeau("check data").out
    assert flambeau("train data --out run", SHORT).code == 0
    predicted = flambeau("predict run data --json --top 1")
    rows = [json.loads(line) for line in predicted.out.splitlines()]
    right = [row["classes"][0]["class"] == Path(row["image"]).parent.name for row in rows]
    assert (len(right), sum(right) / len(right) > 0.95) == (COUNT, True)
    assert flambeau("features run data rows.npy").code == 0
    assert np.load("rows.npy").shape[0] == COUNT
    assert flambeau("report run").code == 0
    page = Path("run/report.html").read_text()
    assert "pictures show channels 1, 2 and 3 of 4" in page
    with Image.open("run/first_batch.jpg") as image:
        assert image.mode == "RGB"
    assert flambeau("verify run").code == 0


def test_a_copy_is_found_by_all_of_its_channels(flambeau: Any) -> None:
    x_NHWC = bands(4)
    x_NHWC[2] = x_NHWC[0]  # a copy
    x_NHWC[6, :, :, :3] = x_NHWC[4, :, :, :3]  # equal in what is shown alone
    write("data", x_NHWC)
    findings = json.loads(flambeau("check data --json").out)["findings"]
    notes = {
        frozenset(row["images"]): row["note"]
        for one in findings
        if one["kind"] in ("copies", "leaks", "near-copies")
        for row in one["found"]
    }
    assert notes == {
        frozenset(("a/00.tif", "a/02.tif")): "the same pixels",
        frozenset(("a/04.tif", "a/06.tif")): "nearly the same pixels; likeness 1.000",
    }


def test_a_predictor_takes_files_arrays_and_tensors(flambeau: Any) -> None:
    x_NHWC = bands(4)
    write("data", x_NHWC)
    assert flambeau("train data --out run", SHORT, "--epochs 1").code == 0
    model = doors.load("run")
    wanted = model("data/b/01.tif").logits
    x_HWC = x_NHWC[1]
    for image in (
        x_HWC,
        x_HWC.astype(np.float32),
        torch.from_numpy(x_HWC).permute(2, 0, 1),
        [x_HWC],
    ):
        torch.testing.assert_close(model(image).logits.reshape(wanted.shape), wanted)
    Image.fromarray(x_HWC.astype(np.uint8)).save("rgba.png")
    with pytest.raises(doors.InputError, match="8 bits per level"):
        model("rgba.png")
    with pytest.raises(doors.InputError, match="image 0: an image of 3 channels, where 4 are"):
        model(x_HWC[:, :, :3])


# ---------------------------------------------------------------- the same bits


def train_in_process(out: str, *more: str, stop_at: str | None = None, procs: int = 1) -> None:
    """Train in a process of its own, which is killed when metrics.jsonl has a text."""
    launch = ["launch", "--procs", str(procs), "--"] if procs > 1 else []
    command = [sys.executable, "-m", "flambeau", *launch, "train", "data", "--out", out]
    command += [*SHORT.split(), "--epochs", "12", "--checkpoint-every", "2st", *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as job:
        metrics, deadline = Path(out, "metrics.jsonl"), time.monotonic() + 120
        while stop_at and not (metrics.exists() and stop_at in metrics.read_text()):
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        if stop_at:
            job.kill()
        _, said = job.communicate(timeout=300)
    assert job.returncode == (-signal.SIGKILL if stop_at else 0), said
    assert stop_at or Path(out, "model.safetensors").exists()


def same_bits(one: str, other: str) -> bool:
    expected, found = (load_file(Path(run, "model.safetensors")) for run in (one, other))
    assert expected.keys() == found.keys()
    return all(torch.equal(value, found[name]) for name, value in expected.items())


def test_a_stop_changes_no_bit(flambeau: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write("data", bands(4))
    more = "--random-erasing 0.3 --mixup 0.2"
    assert flambeau("train data --out whole", SHORT, more).code == 0
    original = Run.step

    def with_signal(self: Run, loss: torch.Tensor) -> None:
        if self.state.step == 7:
            signal.raise_signal(signal.SIGTERM)
        original(self, loss)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", with_signal)
        assert flambeau("train data --out run", SHORT, more).code == 75
    assert flambeau("train data --out run --channels 4 --bits 16", SHORT, more).code == 0
    assert same_bits("whole", "run")


@pytest.mark.slow
def test_neither_a_kill_nor_another_number_of_processes_changes_a_bit() -> None:
    write("data", bands(4))
    train_in_process("whole", "--parts", "4")
    train_in_process("killed", "--parts", "4", stop_at='"step": 9,')
    train_in_process("killed", "--parts", "4")
    assert same_bits("whole", "killed")
    train_in_process("two", "--parts", "4", procs=2)
    assert same_bits("whole", "two")
    assert facts_of("two") == facts_of("whole")


# ---------------------------------------------------------------- what is asked for


def rgba(folder: str, *, bits: int = 8) -> None:
    cv2 = pytest.importorskip("cv2")
    for number, x_HWC in enumerate(bands(4)):
        path = Path(folder, "ab"[number % 2], f"{number:02}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), (x_HWC // 8).astype(np.uint8) if bits == 8 else x_HWC)


@pytest.mark.parametrize("bits", [8, 16])
def test_an_alpha_is_a_channel_where_it_is_asked_for(flambeau: Any, bits: int) -> None:
    rgba("data", bits=bits)
    assert flambeau("train data --out color", SHORT, "--epochs 1").code == 0
    assert facts_of("color")["channels"] == 3
    assert flambeau("train data --out run --channels 4", SHORT).code == 0
    facts = facts_of()
    assert (facts["channels"], facts["pixels"]) == (4, f"uint{bits}")
    assert json.loads(flambeau("evaluate run data --json").out)["accuracy"] > 0.95


def test_arrays_of_four_channels_are_color_and_alpha_and_a_line_says_so(flambeau: Any) -> None:
    np.savez("a.npz", images=(bands(4) // 8).astype(np.uint8), labels=np.arange(COUNT) % 2)
    line = "40 of 40 images looked at are arrays of 4 channels".replace("40", "36")
    trained = flambeau("train a.npz --out color", SHORT, "--epochs 1")
    assert line in trained.out + trained.err
    assert facts_of("color")["channels"] == 3
    trained = flambeau("train a.npz --out run --channels 4", SHORT)
    assert "looked at are arrays" not in trained.out + trained.err
    assert facts_of()["channels"] == 4
    assert json.loads(flambeau("evaluate run a.npz --json").out)["accuracy"] > 0.95


def test_pages_are_channels_where_so_many_are_asked_for(flambeau: Any) -> None:
    """What is learned and answered is that of the same channels as samples of one page."""
    images = bands(5)
    write("samples", images)
    write("pages", np.moveaxis(images, 3, 1), planarconfig=None)
    for data, more in (("samples", ""), ("pages", "--channels 5")):
        trained = flambeau(f"train {data} --out of_{data}", SHORT, more)
        assert "images of 5 channels and 16 bits" in trained.out + trained.err
        assert "several pages" not in trained.out + trained.err
    assert same_bits("of_samples", "of_pages")
    answers = [
        flambeau("predict of_pages", f"{data}/a/00.tif", f"{data}/b/01.tif", "--json")
        for data in ("samples", "pages")
    ]
    assert [answer.err for answer in answers] == ["", ""]
    samples, pages = (
        answer.out.replace(data, "")
        for answer, data in zip(answers, ("samples", "pages"), strict=True)
    )
    assert samples == pages
    assert flambeau("evaluate of_pages pages").code == 0
    assert "several pages" not in flambeau("features of_pages pages x.npy").err
    refused(
        flambeau("train pages --channels 4 --out other", SHORT),
        "1 channel in each of 5 pages",
        "channels = 4",
    )


@pytest.mark.parametrize(("channels", "mode"), [(1, "RGB"), (3, "L")])
def test_grey_or_color_is_made_of_any_image(flambeau: Any, channels: int, mode: str) -> None:
    for number, x_HWC in enumerate(bands(3)):
        path = Path("data", "ab"[number % 2], f"{number:02}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((x_HWC // 8).astype(np.uint8)).convert(mode).save(path)
    assert flambeau(f"train data --out run --channels {channels}", SHORT, "--epochs 1").code == 0
    assert facts_of()["channels"] == channels
    assert load_file("run/model.safetensors")["stem.0.weight"].shape[1] == channels


def test_bits_that_are_asked_for(flambeau: Any) -> None:
    write("data", bands(1)[..., 0])
    for bits in (16, 8):
        assert flambeau(f"train data --out run{bits} --bits {bits}", SHORT, "--epochs 1").code == 0
        assert facts_of(f"run{bits}")["pixels"] == f"uint{bits}"
    Image.new("L", SIDES).save("data/a/00.tif")
    message = refused(flambeau("train data --out new --bits 16", SHORT))
    assert re.search(r"data/a/00.tif is read with 8 bits per level, and bits = 16\n", message)
    trained = flambeau("train data --out mixed", SHORT, "--epochs 1")
    line = r"\d+ of \d+ images looked at have 16 bits and are read as 8, like the others"
    assert re.search(line, trained.out + trained.err)
    assert facts_of("mixed")["pixels"] == "uint8"


def test_the_first_layer_of_published_weights_is_adapted(
    flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision

    weights = torchvision.models.squeezenet1_1(num_classes=1000).state_dict()
    file = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.url.rpartition("/")[2]
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(weights, tmp_path / "hub" / "checkpoints" / file)
    write("data", (bands(4) // 8).astype(np.uint8))
    name = "torchvision:squeezenet1_1"
    trained = flambeau(f"train data --out run --model {name} --pretrained --epochs 1 --lr 1e-9")
    line = f"the first layer of {name}, published for 3 channels, is adapted to 4: its weights are "
    assert line + "repeated and rescaled" in trained.out + trained.err
    (first,) = (
        t for n, t in load_file("run/model.safetensors").items() if n == "features.0.weight"
    )
    wanted = weights["features.0.weight"][:, [0, 1, 2, 0]] * 0.75
    torch.testing.assert_close(first, wanted, rtol=1e-3, atol=1e-5)
    # Of the images, not of ImageNet.
    assert facts_of()["mean"][0] == pytest.approx(1000 / 8 / 255, abs=0.01)


@pytest.mark.parametrize("bits", [8, 16])
def test_features_of_a_model_by_name(
    flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    """Of all channels, normalized by their own mean, with the first layer adapted by timm's rule."""
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.squeezenet1_1(num_classes=1000).eval()
    file = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.url.rpartition("/")[2]
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(model.state_dict(), tmp_path / "hub" / "checkpoints" / file)
    images = bands(5) if bits == 16 else (bands(5) // 8).astype(np.uint8)
    write("data", images[:, :40, :40])
    name = "torchvision:squeezenet1_1"
    answer = flambeau(
        f"features {name} data f.npy --pretrained --image-size 40 --layers features.1"
    )
    assert answer.code == 0, answer
    assert "images of 5 channels, normalized by their own mean and deviation" in answer.err
    assert f"the first layer of {name}, published for 3 channels, is adapted to 5" in answer.err
    x_NHWC = torch.from_numpy(images[:, :40, :40].astype(np.float64))
    order = [*range(0, COUNT, 2), *range(1, COUNT, 2)]  # by their folders
    x_NHWC = ((x_NHWC - x_NHWC.mean((0, 1, 2))) / x_NHWC.std((0, 1, 2), correction=0))[order]
    first = model.features[0]
    weight = first.weight[:, [0, 1, 2, 0, 1]] * 0.6
    with torch.no_grad():
        made = torch.conv2d(x_NHWC.permute(0, 3, 1, 2).float(), weight, first.bias, 2).relu()
    torch.testing.assert_close(torch.from_numpy(np.load("f.npy")), made, rtol=0.05, atol=0.05)


def test_weights_for_other_channels_are_refused(flambeau: Any) -> None:
    """Features behind a first layer of random values would say nothing."""
    import timm
    from safetensors.torch import save_file

    write("data", bands(5))
    for channels in (3, 5):
        weights = timm.create_model("test_resnet", in_chans=channels).state_dict()
        save_file(weights, f"of_{channels}.safetensors")
    words = "features test_resnet data f.npy --image-size 32 --weights"
    refused(
        flambeau(words, "of_3.safetensors"), "conv1", "[16, 3, 3, 3] -> [16, 5, 3, 3]", "as many"
    )
    assert flambeau(words, "of_5.safetensors").code == 0
    assert len(np.load("f.npy")) == COUNT


def test_any_channels_are_moved_by_random_operations(flambeau: Any) -> None:
    write("data", bands(5))
    trained = flambeau("train data --out run --augment trivialaugment", SHORT)
    assert trained.code == 0, trained
    line = "trivialaugment of ShearX, ShearY, TranslateX, TranslateY, Rotate alone"
    assert line in trained.out + trained.err and "Posterize" not in trained.out + trained.err


NET = """
from torch import nn

def build(channels, num_classes):
    layers = nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, num_classes))
"""


@pytest.mark.parametrize(("channels", "pixels"), [(2, "uint8"), (4, "uint16"), (5, "float32")])
def test_what_a_loop_of_ones_own_has_made_is_used(
    flambeau: Any, channels: int, pixels: str
) -> None:
    """Its answers are those of the model on what the loop has learned from."""
    images = bands(channels)[:, :32, :32]
    images = (images // 8).astype(np.uint8) if pixels == "uint8" else images
    write("data", images)
    Path("net.py").write_text(NET)
    Path("floats.py").write_text(
        "import numpy as np\n"
        f"class Own:\n    classes = ['a', 'b']\n    targets = [k % 2 for k in range({COUNT})]\n"
        "    images = np.load('floats.npy')\n    def __len__(self):\n        return len(self.images)\n"
        "    def __getitem__(self, k):\n        return self.images[k], self.targets[k]\n"
        "def data():\n    return Own(), Own()\n"
    )
    floats = images.astype(np.float32) / (1 if pixels == "uint16" else 255)
    np.save("floats.npy", floats)
    mean, std = floats.mean((0, 1, 2)), floats.std((0, 1, 2))
    x_NCHW = torch.from_numpy((floats - mean) / std).permute(0, 3, 1, 2).contiguous()
    labels = torch.arange(COUNT) % 2
    torch.manual_seed(0)
    built: dict[str, Any] = {}
    exec(compile(NET, "net.py", "exec"), built)
    model = built["build"](channels, 2)
    use = {"image_size": 32, "mean": mean.tolist(), "std": std.tolist(), "pixels": pixels}
    run = Run(
        "own", model, torch.optim.AdamW(model.parameters(), lr=0.01), list(zip(x_NCHW, labels, strict=True)),
        batch_size=8, duration="2ep", builder="net.py:build", classes=["a", "b"], preprocess=use,
    )  # fmt: skip
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(torch.nn.functional.cross_entropy(model(x), y))
        for x, y in run.evaluate(list(zip(x_NCHW, labels, strict=True))):
            logits = model(x)
            run.log(val_accuracy=logits.argmax(1) == y, predictions=(logits, y, x))
    assert "data:image/jpeg" in Path("own/report.html").read_text()  # pictures of what was wrong
    with torch.no_grad():
        wanted = model.eval()(x_NCHW).softmax(1)
    given = [*floats] if pixels == "float32" else [*images]
    answers = doors.load("own")(given).probabilities
    torch.testing.assert_close(answers, wanted, rtol=1e-4, atol=1e-5)
    data = "floats.py:data" if pixels == "float32" else "data"
    evaluated = json.loads(flambeau("evaluate own", data, "--json").out)
    right = (wanted.argmax(1) == labels).double().mean()
    assert evaluated["accuracy"] == pytest.approx(float(right), abs=1e-4)
    assert flambeau("features own", data, "f.npy").code == 0
    assert np.load("f.npy").shape == (COUNT, 8)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--color-jitter 0.4", ("color_jitter = 0.4", "images of 4 channels have not")),
        ("--channels 3", ("data/a/00.tif has 4 channels that are no color", "channels = 3")),
        ("--channels 5", ("data/a/00.tif has 4 channels, and channels = 5",)),
        ("--channels 0", ("channels must be from 1 to 1024, got 0",)),
        ("--bits 12", ("bits must be 8 or 16, got 12",)),
    ],
)
def test_settings_that_do_not_fit(flambeau: Any, flags: str, parts: tuple[str, ...]) -> None:
    write("data", bands(4))
    refused(flambeau("train data --out run", SHORT, flags), *parts)
    assert not Path("run").exists()


def test_another_number_of_channels_is_refused_by_its_file(flambeau: Any) -> None:
    write("data/train", bands(4))
    write("data/val", bands(4)[:4])
    assert flambeau("train data --out run", SHORT, "--epochs 1").code == 0
    first, other = (str(Path("data/train/a", name).absolute()) for name in ("00.tif", "02.tif"))
    write("five", bands(5))
    Path("five/a/02.tif").replace(other)
    refused(flambeau("train data --out new", SHORT), f"{other} has 5 channels, and {first} has 4")
    refused(
        flambeau("train data --out new --channels 4", SHORT),
        f"{other} has 5 channels, and channels",
    )
    answer = flambeau("evaluate run data/train --all")
    refused(answer, "data/train/a/02.tif: an image of 5 channels, where 4 are wanted")
    Image.fromarray(bands(3)[0].astype(np.uint8)).save(other)
    refused(flambeau("train data --out new", SHORT), f"{other} has 3 channels, and {first} has 4")
    answer = flambeau("evaluate run data/train --all --skip-bad-images 1")
    assert answer.code == 0, answer.err


def test_other_validation_images_are_refused_at_the_start(flambeau: Any) -> None:
    write("data/train", bands(4))
    write("data/val", bands(5))
    message = "val/a/00.tif has 5 channels, and the training images 4"
    refused(flambeau("train data --out run", SHORT), message)


def test_a_run_goes_on_with_its_own_channels(flambeau: Any) -> None:
    write("data", bands(4))
    assert flambeau("train data --out run", SHORT, "--epochs 1").code == 0
    for flag, there in (("--channels 3", "channels: 4"), ("--bits 8", "bits: 16")):
        refused(flambeau("train data --out run", flag), f"{there} there, {flag.split()[1]} now")
    more = "--channels 4 --bits 16 --extend 1ep"
    assert flambeau("train data --out run", SHORT, "--epochs 1", more).code == 0


def test_channels_at_an_unknown_end_are_refused(flambeau: Any) -> None:
    np.savez("a.npz", images=np.zeros((4, 20, 30, 40), np.uint8), labels=np.arange(4) % 2)
    refused(
        flambeau("train a.npz --out run", SHORT), "the channels of (20, 30, 40) may be at either"
    )


# ---------------------------------------------------------------- exports


@pytest.mark.parametrize(
    "format_",
    [
        "safetensors",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("torch-export", "onnx", "aoti")),
    ],
)
@pytest.mark.parametrize("bits", [8, 16])
def test_an_export_answers_as_the_run(flambeau: Any, format_: str, bits: int) -> None:
    x_NHWC = bands(5) if bits == 16 else (bands(5) // 8).astype(np.uint8)
    write("data", x_NHWC)
    assert flambeau("train data --out run", SHORT).code == 0
    exported = flambeau("export run --out shipped --allow-slower --format", format_)
    assert exported.code == 0, exported.err
    answers = [
        [
            json.loads(row)["classes"]
            for row in flambeau(f"predict {one} data --json").out.splitlines()
        ]
        for one in ("run", "shipped")
    ]
    assert len(answers[0]) == COUNT
    for ours, theirs in zip(*answers, strict=True):
        assert [one["class"] for one in theirs] == [one["class"] for one in ours]
        assert theirs[0]["probability"] == pytest.approx(ours[0]["probability"], abs=2e-5)
    np.save("image.npy", x_NHWC[1])
    words = [sys.executable, "shipped/example.py"]
    done = subprocess.run([*words, "image.npy"], capture_output=True, text=True, check=True)
    best, share = done.stdout.split(": ")[1].split()
    (ours,) = json.loads(flambeau("predict run data/b/01.tif --json --top 1").out)["classes"]
    assert (best, float(share)) == (ours["class"], pytest.approx(ours["probability"], abs=2e-5))
    no_array = subprocess.run(
        [*words, "data/b/01.tif"], capture_output=True, text=True, check=False
    )
    assert "takes images of 5 channels, which are not read from image files here" in no_array.stderr
    assert flambeau("verify shipped").code == 0
    assert not Path("shipped/classify.cpp").exists()


def test_an_example_makes_the_first_layer_of_torchvision(flambeau: Any) -> None:
    x_NHWC = (bands(4) // 8).astype(np.uint8)
    write("data", x_NHWC)
    model = "--model torchvision:squeezenet1_1 --epochs 1 --image-size 32 --precision fp32"
    assert flambeau("train data --out run", model).code == 0
    assert flambeau("export run --out shipped --allow-slower --format safetensors").code == 0
    np.save("image.npy", x_NHWC[1])
    words = [sys.executable, "shipped/example.py", "image.npy"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    (ours,) = json.loads(flambeau("predict run data/b/01.tif --json --top 1").out)["classes"]
    assert float(done.stdout.split()[-1]) == pytest.approx(ours["probability"], abs=2e-5)


# ---------------------------------------------------------------- packed and compared


def test_packed_files_keep_all_channels(flambeau: Any) -> None:
    x_NHWC = bands(4)
    write("data", x_NHWC)
    for name in ("a.rec", "a.tar"):
        assert flambeau(f"pack data {name}").code == 0
        checked = flambeau(f"verify {name} --deep")
        assert (checked.code, "40 images, all whole" in checked.out) == (0, True)
    assert flambeau("train a.rec --out run", SHORT, "--epochs 1").code == 0
    assert (facts_of()["channels"], facts_of()["pixels"]) == (4, "uint16")
    assert flambeau("pack data a.npz --encode raw").code == 0
    with np.load("a.npz") as packed:
        images = next(array for array in packed.values() if array.ndim == 4)
    assert sorted(map(np.ndarray.tobytes, images)) == sorted(map(np.ndarray.tobytes, x_NHWC))
    for flags in ("--encode png", "--resize 20"):
        refused(
            flambeau("pack data b.rec --fresh", flags),
            "its 4 channels are no color",
            "--encode raw",
        )
    whole = Path("data/a/00.tif").read_bytes()
    Path("data/a/00.tif").write_bytes(whole[:5000])
    assert "00.tif" in flambeau("pack data c.rec").err


def test_two_sets_are_compared_by_all_channels() -> None:
    x_NHWC = bands(4)
    write("one", x_NHWC)
    x_NHWC[6, 3, 5, 3] += 7
    write("other", x_NHWC)
    one, other = (open_source(Path(name), ("a", "b")) for name in ("one", "other"))
    found = sample_difference(one, other)
    assert found is not None
    value = x_NHWC[6, 3, 5]
    assert "a/06.tif, first in row 3, column 5" in found.text
    assert f"/{value[3] - 7} and " in found.text
    assert found.text.endswith("/".join(map(str, value)))


def test_masks_of_five_channels_are_learned(flambeau: Any) -> None:
    """Squares that the fifth channel alone shows."""
    tifffile = pytest.importorskip("tifffile")
    rng = np.random.default_rng(0)
    Path("data/images").mkdir(parents=True)
    Path("data/masks").mkdir()
    for number, x_HWC in enumerate(bands(5)[::2][:16]):
        mask = np.zeros(SIDES, np.uint8)
        top = rng.integers(0, 20)
        mask[top : top + 18, 8:28] = 1
        x_HWC[..., 4] += np.uint16(300) * mask
        tifffile.imwrite(
            f"data/images/{number:02}.tif", x_HWC, photometric="minisblack", planarconfig="contig"
        )
        Image.fromarray(mask).save(f"data/masks/{number:02}.png")
    model = "--model resnet18 --epochs 3 --batch-size 4 --image-size 32 --precision fp32"
    trained = flambeau("train data --out run", model)
    assert trained.code == 0, trained.err
    assert (facts_of()["channels"], facts_of()["pixels"]) == (5, "uint16")
    assert json.loads(flambeau("evaluate run data --all --json").out)["miou"] > 0.7
    assert flambeau("predict run data/images --masks masks --overlays over").code == 0
    with Image.open("over/00.png") as picture, Image.open("masks/00.png") as mask_picture:
        assert (picture.mode, picture.size) == ("RGB", SIDES[::-1])
        assert mask_picture.size == SIDES[::-1]
