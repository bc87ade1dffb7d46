"""Milliseconds of one call of a network as each runtime has it, in one process and in turn.

    python bench/inference.py [--model NAME] [--size PIXELS] [--batch N] [--threads N] [--rounds N] [--record]

Contenders on normalized float32 images: eager, channels_last and bf16; torch.compile; ONNX
Runtime in float32 and int8 (static QDQ, per channel, as `flambeau export` makes it); OpenVINO with the same
two files, where it is installed (extra `bench`), in float32 and, which it chooses by itself where the
processor has it, bfloat16; folded; half of the channels pruned, alone and with int8. Then what `flambeau
export` writes, from uint8 pixels to probabilities: prepared images, and 375 x 500 ones, by the library it is
for and, for int8, by OpenVINO as well.
Weights are random and ranges measured on noise: times, not accuracies. The contenders take turns; a time is
the median of the rounds after two that do not count, and `spread` the 10th and 90th percentile. One JSON
line for each contender; `times_eager` is the median of the ratios within a round.
"""

import argparse
import importlib.metadata
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from flambeau.exports.formats.aot_inductor_file import open_aot_inductor, write_aot_inductor
from flambeau.exports.formats.onnx_file import open_onnx, write_onnx
from flambeau.exports.formats.onnx_int8 import quantize_static
from flambeau.exports.served_model import ServedModel
from flambeau.recipes.compress.fold_batchnorm import fold_batchnorm
from flambeau.recipes.compress.prune_channels import prune_channels
from provenance import commit, cpu_model, record  # beside this script

Call = Callable[[], object]


def onnx_files(network: nn.Module, x: Tensor, place: Path, name: str) -> tuple[Path, Path]:
    """The network alone in float32, and in int8 with the settings of `flambeau export`."""
    from onnxruntime.quantization import (  # type: ignore[import-untyped]
        CalibrationDataReader,
        QuantFormat,
        QuantType,
    )
    from onnxruntime.quantization import quantize_static as quantize
    from onnxruntime.quantization.shape_inference import (  # type: ignore[import-untyped]
        quant_pre_process,
    )

    whole, prepared, small = (place / f"{name}{end}.onnx" for end in ("", "-prepared", "-int8"))
    torch.onnx.export(
        network, (x,), f=str(whole), input_names=["x"], external_data=False, verbose=False
    )
    quant_pre_process(str(whole), str(prepared), skip_symbolic_shape=True)

    class Noise(CalibrationDataReader):  # type: ignore[misc]
        left = 4

        def get_next(self) -> dict[str, Any] | None:
            self.left -= 1
            return None if self.left < 0 else {"x": torch.randn(x.shape).numpy()}

    quantize(
        str(prepared), str(small), Noise(), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    return whole, small


def by_onnxruntime(path: Path, x: Tensor, threads: int) -> Call:
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = {"x": x.numpy()}
    return lambda: session.run(None, given)


def by_openvino(path: Path, given: list[Tensor], threads: int, *, precision: str) -> Call | None:
    try:
        import openvino  # type: ignore[import-not-found]
    except ImportError as error:
        print(f"OpenVINO is not measured: {error}")
        return None
    hints = {
        "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
    }  # fmt: skip
    model = openvino.Core().compile_model(str(path), "CPU", hints)
    arrays = [tensor.numpy() for tensor in given]
    return lambda: model(arrays)


def contenders(model: str, size: int, batch: int, threads: int, place: Path) -> dict[str, Call]:
    x = torch.randn(batch, 3, size, size)
    network = torchvision.models.get_model(model, weights=None).eval()
    pruned = prune_channels(network, x[:1], amount=0.5).model.eval()
    folded = fold_batchnorm(network, x[:1]).model
    compiled: Any = torch.compile(network)
    last = torchvision.models.get_model(model, weights=None).eval()
    last = last.to(memory_format=torch.channels_last)
    half = torchvision.models.get_model(model, weights=None).eval().bfloat16()
    x_last, x_half = x.contiguous(memory_format=torch.channels_last), x.bfloat16()
    found: dict[str, Call | None] = {
        "eager": lambda: network(x),
        "eager, channels_last": lambda: last(x_last),
        "eager, bf16": lambda: half(x_half),
        "folded": lambda: folded(x),
        "half pruned": lambda: pruned(x),
        "torch.compile": lambda: compiled(x),
    }
    for name, net in (("", network), ("half pruned, ", pruned)):
        whole, small = onnx_files(net, x, place, name[:4] or "whole")
        found[f"{name}ONNX Runtime"] = by_onnxruntime(whole, x, threads)
        found[f"{name}ONNX Runtime int8"] = by_onnxruntime(small, x, threads)
        for kind, file, precision in (
            ("", whole, "f32"),
            (" bf16", whole, "bf16"),
            (" int8", small, "f32"),
        ):
            found[f"{name}OpenVINO{kind}"] = by_openvino(file, [x], threads, precision=precision)
    found |= exports(network, size, batch, threads, place)
    return {name: call for name, call in found.items() if call is not None}


def exports(
    network: nn.Module, size: int, batch: int, threads: int, place: Path
) -> dict[str, Call | None]:
    images = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "size": size}
    served = ServedModel(network, {**images, "interpolation": "bilinear"})
    whole, small, package = (place / name for name in ("e.onnx", "e8.onnx", "e.aoti.pt2"))
    write_onnx(served, whole)
    noise = torch.randint(0, 256, (16, size, size, 3), dtype=torch.uint8)
    quantize_static(whole, small, noise)
    write_aot_inductor(served, package)
    opened = {
        "onnx": open_onnx(whole, threads),
        "onnx int8": open_onnx(small, threads),
        "aoti": open_aot_inductor(package, threads),
    }
    found: dict[str, Call | None] = {}
    for height, width in ((size, size), (375, 500)):
        pixels = torch.randint(0, 256, (batch, height, width, 3), dtype=torch.uint8)
        full = torch.tensor([height, width])
        for name, classify in opened.items():
            found[f"flambeau export {name}, {height} x {width} pixels in"] = (
                lambda classify=classify, pixels=pixels, full=full: classify(pixels, full)
            )
        found[f"flambeau export onnx int8 by OpenVINO, {height} x {width} pixels in"] = by_openvino(
            small, [pixels, full], threads, precision="f32"
        )
    return found


def measure(found: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in found}
    with torch.inference_mode():
        for number in range(rounds + 2):
            for name, call in found.items():
                start = time.perf_counter()
                call()
                if number >= 2:
                    times[name].append(1000 * (time.perf_counter() - start))
    return times


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--record", action="store_true")
    told = parser.parse_args()
    at = commit()
    torch.manual_seed(0)
    torch.set_num_threads(told.threads)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        found = contenders(told.model, told.size, told.batch, told.threads, Path(place))
        times = measure(found, told.rounds)
    words = f"--model {told.model} --size {told.size} --batch {told.batch} --threads {told.threads}"
    packages = ("torchvision", "onnx", "onnxruntime", "openvino", "flambeau")
    for name, own in times.items():
        deciles = statistics.quantiles(own, n=10)
        ratios = [mine / eager for mine, eager in zip(own, times["eager"], strict=True)]
        row = {
            "contender": name, "ms": round(statistics.median(own), 2),
            "spread": [round(deciles[0], 2), round(deciles[-1], 2)],
            "times_eager": round(statistics.median(ratios), 3), "n": len(own),
            "model": told.model, "size": told.size, "batch": told.batch, "threads": told.threads,
            "torch": torch.__version__, **{one: version(one) for one in packages},
            "cpu": cpu_model(), "commit": at,
            "command": f"python bench/inference.py {words} --rounds {told.rounds} --record",
        }  # fmt: skip
        record(row, __file__, keep=told.record)


if __name__ == "__main__":
    main()
