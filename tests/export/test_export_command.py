"""`flambeau export`: the answers of the run, from files that need no flambeau."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.cli.command import main
from flambeau.exports import step_figures
from flambeau.exports.formats.all_formats import FORMATS
from flambeau.exports.load_export import load_export
from flambeau.exports.standalone.preprocess import Preprocessing
from flambeau.provenance import made_now
from flambeau.trainer.parts.model import SMALL
from flambeau.trainer.prediction.trained_model import load_trained
from forked_python import ALONE

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def exports(
    exported_run: Path, tmp_path_factory: pytest.TempPathFactory, kept_process: Any
) -> dict[str, Path]:
    """One in each format that needs no compiler."""
    folder = tmp_path_factory.mktemp("exports")
    found = {}
    with pytest.MonkeyPatch.context() as patch, kept_process():
        patch.setattr(step_figures, "_ROUNDS", range(1, 2))
        for name, words in {"torch-export": "--fold", "onnx": "", "safetensors": ""}.items():
            found[name] = folder / name
            line = (
                f"export {exported_run} --out {found[name]} --format {name} --allow-slower {words}"
            )
            assert main(line.split()) == 0
    return found


def run_example(
    run_python: RunPython, export: Path, files: list[Path]
) -> dict[str, tuple[str, float]]:
    """What example.py says where flambeau cannot be imported."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = run_python("-c", ALONE, export / "example.py", *files, environ=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return answers_in(done.stdout)


def answers_in(text: str) -> dict[str, tuple[str, float]]:
    found = {}
    for line in text.splitlines():
        name, _, answer = line.rpartition(": ")
        label, share = answer.split()
        found[Path(name).name] = label, float(share)
    return found


def predicted(flambeau: Any, model: Path, files: list[Path]) -> dict[str, tuple[str, float]]:
    answer = flambeau("predict", model, "--json --top 1", *files)
    assert answer.code == 0, answer.err
    rows = map(json.loads, answer.out.splitlines())
    return {
        Path(row["image"]).name: (row["classes"][0]["class"], row["classes"][0]["probability"])
        for row in rows
    }


def equal(a: dict[str, tuple[str, float]], b: dict[str, tuple[str, float]]) -> None:
    assert a.keys() == b.keys()
    for name, (label, share) in a.items():
        assert label == b[name][0], name
        assert share == pytest.approx(b[name][1], abs=1.1e-5), name


def written(folder: Path, images: Iterable[tuple[str, bytes]]) -> list[Path]:
    folder.mkdir()
    for name, data in images:
        (folder / name).write_bytes(data)
    return sorted(folder.iterdir())


@pytest.fixture
def files(tmp_path: Path, nasty_images: Any) -> list[Path]:
    return written(tmp_path / "nasty", nasty_images(44, seed=3))


@pytest.mark.parametrize("name", ["torch-export", "onnx", "safetensors"])
def test_example_without_flambeau_gives_the_answers_of_the_run(
    exports: dict[str, Path],
    exported_run: Path,
    files: list[Path],
    flambeau: Any,
    run_python: RunPython,
    name: str,
) -> None:
    """Files of every kind, through the graph's own resizing; and `flambeau predict EXPORT`."""
    expected = predicted(flambeau, exported_run, files)
    assert len({label for label, _ in expected.values()}) > 1
    equal(run_example(run_python, exports[name], files), expected)
    equal(predicted(flambeau, exports[name], files), expected)


@pytest.mark.parametrize("name", ["torch-export", "onnx", "safetensors"])
def test_export_is_evaluated_and_verified_like_a_run(
    exports: dict[str, Path], exported_run: Path, flambeau: Any, name: str
) -> None:
    photos = exported_run.parent / "photos"
    [run, export] = [
        json.loads(flambeau("evaluate", model, photos, "--json").out)
        for model in (exported_run, exports[name])
    ]
    assert export["confusion"] == run["confusion"]
    assert export["loss"] == pytest.approx(run["loss"], abs=1e-5)
    answer = flambeau("verify", exports[name])
    assert answer.code == 0
    assert (
        "whole: its bytes are those of its own list; where they come from is not known"
        in answer.out
    )


def test_graph_takes_any_number_and_size_of_images(exports: dict[str, Path]) -> None:
    torch.manual_seed(0)
    for name, export in exports.items():
        format_ = FORMATS[name]
        classify = format_.open(export / format_.file, 1, made_now(export))
        for shape in [(1, 32, 32, 3), (5, 32, 32, 3), (2, 90, 41, 3), (1, 1, 300, 3)]:
            pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
            full = torch.tensor(shape[1:3])
            each = torch.cat([classify(one[None], full) for one in pixels])
            torch.testing.assert_close(classify(pixels, full), each, rtol=0, atol=1e-5)


def test_folder_says_what_it_holds(exports: dict[str, Path], exported_run: Path) -> None:
    for name, export in exports.items():
        told = json.loads((export / "export.json").read_text())
        files = {path.name for path in export.iterdir() if path.is_file()}
        assert set(told["files"]) == files - {"export.json"}
        assert told["classes"] == ["stripes", "tiles", "waves"]
        assert "data" not in told["settings"]
        steps = [row["step"] for row in told["steps"]]
        assert steps == (["run", "fold", name] if name == "torch-export" else ["run", name])
        for row in told["steps"]:
            assert row["agreement"] == 1
            assert row["max_difference"] < 1e-5
            assert {cell["batch"] for cell in row["latencies"]} == {1, 32}
        card = (export / "README.md").read_text()
        assert f"# {SMALL.replace('_', chr(92) + '_')}, 3 classes, as {name}" in card
        assert str(exported_run) not in card + json.dumps(told)
        assert len(re.findall(r"^for|^import|^from|\n", (export / "example.py").read_text())) < 25


def test_int8_is_a_quarter_and_keeps_its_answers(
    exported_run: Path, tmp_path: Path, flambeau: Any, exports: dict[str, Path]
) -> None:
    answer = flambeau(
        "export", exported_run, "--format onnx --quantize int8 --allow-slower --min-agreement 0.9 --out",
        tmp_path / "int8", "--json",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    [found] = [json.loads(line) for line in answer.out.splitlines()]
    *_, whole, eight = found["steps"]
    assert (whole["step"], eight["step"]) == ("onnx", "int8")
    # The resizing and scales stay; the weights of this small network are a quarter.
    saved = whole["bytes"] - eight["bytes"]
    assert saved > 0.6 * sum(
        p.numel() * 3 for p in load_trained(exported_run, say=print).model.parameters()
    )
    assert not list(tmp_path.glob("int8/*fp32*"))
    import onnx

    graph = onnx.load(str(tmp_path / "int8" / "model.onnx")).graph
    counts = [node.op_type for node in graph.node]
    assert counts.count("Conv") == 9
    assert counts.count("DequantizeLinear") > 20
    assert flambeau("verify", tmp_path / "int8").code == 0
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "int8" / "model.onnx"))
    pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 50, 3), dtype=np.uint8)
    given = {"pixels": pixels, "full_size": np.array([40, 50])}
    logits, probabilities = map(torch.from_numpy, session.run(None, given))
    torch.testing.assert_close(probabilities, logits.softmax(1))  # and not one of 256 levels


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["dynamic", "fp16"])
def test_other_quantizations(
    exported_run: Path,
    tmp_path: Path,
    flambeau: Any,
    monkeypatch: pytest.MonkeyPatch,
    quantize: str,
) -> None:
    """Though slower: it is allowed."""
    monkeypatch.setattr(step_figures, "_ratio", lambda times: 2.1)
    format_name = "onnx" if quantize == "dynamic" else "torch-export"
    out = tmp_path / "out"
    answer = flambeau(
        "export", exported_run, f"--format {format_name} --quantize {quantize} --allow-slower",
        "--min-agreement 0.9 --images 20 --json --out", out,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    [found] = map(json.loads, answer.out.splitlines())
    steps = {row["step"]: row["bytes"] for row in found["steps"]}
    if quantize == "dynamic":  # of the one linear layer, which is small
        assert steps["dynamic"] < steps["onnx"] + 10_000
    else:
        assert steps[quantize] == pytest.approx(steps["run"] / 2, rel=0.01)
    assert load_export(out).logits(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 3)


def test_pruned_network_is_smaller_and_trained_again(
    exported_run: Path, tmp_path: Path, flambeau: Any
) -> None:
    out = tmp_path / "small"
    words = (
        "--prune 0.5 --fine-tune 40st --allow-slower --min-agreement 0.5 --images 30 --json --out"
    )
    answer = flambeau("export", exported_run, words, out)
    assert answer.code == 0, answer.err
    [found] = map(json.loads, answer.out.splitlines())
    run, pruned, file = found["steps"]
    assert pruned["step"] == "prune"
    assert pruned["bytes"] < 0.4 * run["bytes"]
    assert file["accuracy"] == pruned["accuracy"] > 0.6
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert not (out / "training").exists()
    assert flambeau("verify", out).code == 0


@pytest.mark.slow
def test_quantization_aware_training_gives_integers(
    exported_run: Path, tmp_path: Path, flambeau: Any, files: list[Path], run_python: RunPython
) -> None:
    out = tmp_path / "qat"
    words = (
        "--quantize qat --fine-tune 12st --format onnx --allow-slower --min-agreement 0.9 --json"
    )
    answer = flambeau("export", exported_run, words, "--out", out)
    assert answer.code == 0, answer.err
    [found] = map(json.loads, answer.out.splitlines())
    steps = {row["step"]: row for row in found["steps"]}
    assert list(steps) == ["run", "fold", "qat", "onnx"]
    assert steps["onnx"]["bytes"] < 0.65 * steps["run"]["bytes"]  # the graph is 0.4 MB
    assert steps["onnx"]["accuracy"] >= steps["run"]["accuracy"] - 0.05
    import onnx

    operations = [node.op_type for node in onnx.load(str(out / "model.onnx")).graph.node]
    assert operations.count("QuantizeLinear") >= 10
    assert predicted(flambeau, out, files).keys() == run_example(run_python, out, files).keys()


def refuse(flambeau: Any, exported_run: Path, tmp_path: Path, *words: Any) -> str:
    answer = flambeau("export", exported_run, "--images 8 --out", tmp_path / "out", *words)
    assert answer.code == 2, answer.out
    assert not list(tmp_path.glob("**/*.pt2")), "nothing is written"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert "Traceback" not in answer.err
    return str(answer.err)


def test_step_that_changes_answers_is_refused(
    exported_run: Path, tmp_path: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flambeau.exports import steps

    original = steps.fold_batchnorm

    def wrong(model: Any, example: Any) -> Any:
        result = original(model, example)
        with torch.no_grad():
            result.model.head.bias += torch.tensor([50.0, 0.0, 0.0])
        return result

    monkeypatch.setattr(steps, "fold_batchnorm", wrong)
    text = refuse(flambeau, exported_run, tmp_path, "--fold --allow-slower")
    assert "fold gives the answer of the run on" in text
    assert "--min-agreement is 99.00%" in text


def test_step_that_is_slower_is_refused(
    exported_run: Path, tmp_path: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_figures, "_ratio", lambda times: 2.1)
    text = refuse(flambeau, exported_run, tmp_path, "--quantize bf16 --min-agreement 0")
    assert "bf16 takes 2.10 times as long as before" in text


def test_wrong_input(
    exported_run: Path, tmp_path: Path, flambeau: Any, exports: dict[str, Path]
) -> None:
    def told(*words: Any) -> str:
        return refuse(flambeau, exported_run, tmp_path, *words)

    assert "--quantize int8 needs --format onnx" in told("--quantize int8")
    assert "--quantize bf16 does not go with" in told("--quantize bf16 --format onnx")
    assert "that step makes another" in told("--format safetensors --fold")
    assert "--quantize qat needs --format onnx" in told("--quantize qat")
    assert "--prune must be between 0 and 1" in told("--prune 1")
    assert "--fine-tune trains a pruned network" in told("--fine-tune 1ep")
    assert "--fine-tune must be a duration" in told("--prune 0.5 --fine-tune soon")
    assert "--fine-tune 0ep trains nothing" in told("--prune 0.5 --fine-tune 0ep")
    unused = told("--quantize dynamic --format onnx --calibrate", exported_run.parent / "photos")
    assert "--calibrate is for the ranges of --quantize int8 or qat" in unused
    assert "must be from 0 to 1" in told("--min-agreement 99")
    assert "must be at least 1" in told("--images 0")
    assert "does not exist" in told("--data", tmp_path / "nothing")
    assert "no module has a method fuse" in told("--reparameterize")
    answer = flambeau("export", exported_run, "--out", tmp_path)
    assert (answer.code, "exists" in answer.err) == (2, True)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    answer = flambeau("export", exported_run, "--out", tmp_path / "link")
    assert (answer.code, "link exists" in answer.err) == (2, True)
    answer = flambeau("export", exported_run, "--out", tmp_path / "a" / "b")
    assert (answer.code, "Make it first" in answer.err) == (2, True)
    answer = flambeau("export", exports["onnx"], "--out", tmp_path / "again")
    assert (answer.code, "config.toml" in answer.err) == (2, True)
    answer = flambeau("predict", exports["onnx"], exported_run.parent / "photos", "--image-size 48")
    assert (answer.code, "an export is made for images of 32 pixels" in answer.err) == (2, True)


def test_onnx_without_its_packages_says_what_to_install(
    exported_run: Path, tmp_path: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("onnxscript", "onnxruntime"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            text = refuse(flambeau, exported_run, tmp_path, "--format onnx --prune 0.5")
        assert "pip install 'flambeau[export]'" in text
        assert "epoch" not in text, "told before anything is trained"


def test_aoti_without_a_compiler_says_so_before_anything_is_measured(
    exported_run: Path, tmp_path: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    text = refuse(flambeau, exported_run, tmp_path, "--format aoti")
    assert "there is no g++ or clang++ here" in text
    assert "measuring" not in text


def test_first_line_comes_before_the_first_measuring(
    exported_run: Path, tmp_path: Path, flambeau: Any
) -> None:
    answer = flambeau("export", exported_run, "--format safetensors --out", tmp_path / "out")
    assert answer.code == 0
    assert answer.err.startswith("run: measuring on 6 images\n")


@pytest.mark.parametrize("name", ["torch-export", "onnx", "safetensors"])
def test_file_has_no_place_of_this_machine(exports: dict[str, Path], name: str) -> None:
    """torch writes where each line of a traced module stands."""
    file = exports[name] / FORMATS[name].file
    parts = [file.read_bytes()]
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as opened:
            parts = [opened.read(part) for part in opened.namelist()]
    for place in ("served_model.py", str(Path(torch.__file__).parent)):
        assert not any(place.encode() in part for part in parts)


Damage = Callable[[Path], None]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def other_list(path: Path) -> None:
    told = json.loads((path.parent / "export.json").read_text())
    del told["files"]["model.onnx"]
    (path.parent / "export.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (cut, 1, "model.onnx: DAMAGED"),
        (Path.unlink, 1, "model.onnx: missing"),
        (other_list, 1, "it lists no hash of model.onnx"),
        (lambda path: (path.parent / "export.json").write_text("[1]"), 2, "not of an export"),
        (lambda path: (path.parent / "export.json").write_text("{"), 2, "no JSON"),
        (lambda path: (path.parent / "export.json").write_text("[" * 100_000), 2, "nested too"),
    ],
)
def test_verify_names_what_is_wrong(
    exports: dict[str, Path], tmp_path: Path, flambeau: Any, damage: Damage, code: int, words: str
) -> None:
    shutil.copytree(exports["onnx"], tmp_path / "copy")
    damage(tmp_path / "copy" / "model.onnx")
    answer = flambeau("verify", tmp_path / "copy")
    assert (answer.code, words in answer.out + answer.err) == (code, True), answer


@pytest.mark.parametrize(
    ("edited", "words"),
    [
        ({"image_size": 64}, "does not fit the model beside it"),
        ({"dataset.classes": ["a"]}, "does not fit the model beside it"),
        ({"dataset.classes": 3}, "'classes' in it is not what a run writes"),
        ({"dataset.channels": "x"}, "'channels' in it is not what"),
    ],
)
def test_edited_index_is_told(
    exports: dict[str, Path], tmp_path: Path, flambeau: Any, edited: dict[str, Any], words: str
) -> None:
    shutil.copytree(exports["onnx"], tmp_path / "copy")
    told = json.loads((tmp_path / "copy" / "export.json").read_text())
    for name, value in edited.items():
        place, _, key = name.rpartition(".")
        (told[place] if place else told)[key] = value
    (tmp_path / "copy" / "export.json").write_text(json.dumps(told))
    answer = flambeau("predict", tmp_path / "copy", exports["onnx"].parent)
    assert (answer.code, words in answer.err) == (2, True), answer.err


def test_other_answers_than_those_of_the_export_are_said(
    exports: dict[str, Path], exported_run: Path, tmp_path: Path, flambeau: Any
) -> None:
    shutil.copytree(exports["onnx"], tmp_path / "copy")
    told = json.loads((tmp_path / "copy" / "export.json").read_text())
    told["answers"][0][0] += 1.0
    (tmp_path / "copy" / "export.json").write_text(json.dumps(told))
    image = exported_run.parent / "photos" / "waves" / "1.png"
    answer = flambeau("predict", tmp_path / "copy", image)
    assert (answer.code, "a logit is 1 off the one" in answer.err) == (0, True)
    assert flambeau("verify", tmp_path / "copy").code == 0  # which runs nothing


def test_file_of_an_export_that_is_damaged_is_told_by_predict(
    exports: dict[str, Path], tmp_path: Path, flambeau: Any
) -> None:
    for name, export in exports.items():
        copied = tmp_path / name
        shutil.copytree(export, copied)
        cut(copied / FORMATS[name].file)
        answer = flambeau("predict", copied, exports[name].parent)
        assert answer.code == 2
        assert "cannot be" in answer.err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_files_of_every_kind_get_one_answer_everywhere(
    exports: dict[str, Path],
    exported_run: Path,
    tmp_path: Path,
    flambeau: Any,
    nasty_images: Any,
    run_python: RunPython,
) -> None:
    """The run, the examples of all formats, the compiled package in Python and in C++; and NumPy's pixels."""
    files = written(tmp_path / "nasty", nasty_images(250, seed=4))
    aoti = tmp_path / "aoti"
    answer = flambeau("export", exported_run, "--format aoti --allow-slower --out", aoti)
    assert answer.code == 0, answer.err
    expected = predicted(flambeau, exported_run, files)
    assert len({label for label, _ in expected.values()}) == 3
    for export in (*exports.values(), aoti):
        equal(run_example(run_python, export, files), expected)
    equal(by_numpy(exported_run, aoti, files), expected)
    equal(by_cpp(aoti, files, tmp_path), expected)


def by_numpy(run: Path, export: Path, files: list[Path]) -> dict[str, tuple[str, float]]:
    """The run's own network on what preprocess.py alone makes of the files."""
    reader, trained = Preprocessing(export), load_trained(run, say=print)
    found = {}
    for file in files:
        x = reader.normalize(reader.prepare(*reader.read_image(file)))
        with torch.inference_mode():
            shares = trained.model(torch.from_numpy(x))[0].softmax(0)
        found[file.name] = reader.classes[int(shares.argmax())], float(shares.max())
    return found


def by_cpp(export: Path, files: list[Path], scratch: Path) -> dict[str, tuple[str, float]]:
    root = Path(torch.__file__).parent
    includes = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    libraries = [f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-Wl,--no-as-needed"]
    libraries += ["-ltorch", "-ltorch_cpu", "-lc10"]
    program, source = str(scratch / "classify"), str(export / "classify.cpp")
    subprocess.run(
        ["g++", "-std=c++20", "-O0", source, "-o", program, *includes, *libraries], check=True
    )
    reader, words = Preprocessing(export), list[str]()
    for file in files:
        pixels, (height, width) = reader.read_image(file)
        picture = scratch / f"{file.name}.ppm"
        Image.fromarray(pixels).save(picture)
        words.append(f"{picture}={height}x{width}")
    model, labels = str(export / "model.aoti.pt2"), str(export / "labels.txt")
    command = [program, model, labels, *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name.removesuffix(".ppm"): said for name, said in answers_in(done.stdout).items()}


@pytest.mark.parametrize(
    "name", ["torch-export", "safetensors", pytest.param("onnx", marks=pytest.mark.slow)]
)
def test_full_disk_is_told_in_a_line(
    exported_run: Path, tmp_path: Path, flambeau: Any, name: str
) -> None:
    """Whatever is written is written by flambeau: torch's own writer aborts the process."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))  # bytes of one file
    try:
        text = refuse(flambeau, exported_run, tmp_path, "--format", name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large; raise the limit (`ulimit -f`)" in text.splitlines()[-1]
