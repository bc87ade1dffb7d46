"""Weights of every kind into new files, bit by bit; and what `verify` says of files that are not right."""

import errno
import json
import os
import pickle
import shutil
import subprocess
import tarfile
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from flambeau.cli import command
from flambeau.parallel.shard_layout import weights_bytes
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk, save_checkpoint, to_bytes
from flambeau.recipes.checkpoints.state_dict_prefixes import add_prefix
from flambeau.weights.weights_summary import is_weights, report_weights
from flambeau.weights.writer import write_weights


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "VERBS", tuple(dict.fromkeys((*command.VERBS, "convert"))))


class Tied(nn.Module):
    """Two names for one weight, and weights of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.bn = nn.BatchNorm1d(3)
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("vacant", torch.empty(0, 2))
        self.register_buffer("brain", torch.ones(2, dtype=torch.bfloat16))


def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        torch.testing.assert_close(got[name], tensor.detach(), rtol=0, atol=0)


SOURCES: dict[str, Callable[[Tied], Any]] = {
    "a plain state_dict": lambda m: m.state_dict(),
    "the ImageNet example": lambda m: {
        "state_dict": nn.DataParallel(m).state_dict(),
        "best": torch.ones(1),
    },
    "timm": lambda m: {
        "epoch": 1,
        "state_dict": m.state_dict(),
        "state_dict_ema": model().state_dict(),
    },
    "numpy and arguments": lambda m: {"model": m.state_dict(), "best_acc": np.float64(0.5)},
    "compiled": lambda m: {
        "model_state_dict": add_prefix(nn.DataParallel(m).state_dict(), "_orig_mod.")
    },
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", SOURCES)
def test_same_bits(flambeau: Any, name: str, legacy: bool, suffix: str) -> None:
    torch.save(SOURCES[name](model()), "in.pth.tar", _use_new_zipfile_serialization=not legacy)
    answer = flambeau("convert", "in.pth.tar", f"out{suffix}")
    assert answer.code == 0, answer
    if suffix == ".pth":
        got = torch.load("out.pth", weights_only=True)
        assert got["first.weight"].data_ptr() == got["second.weight"].data_ptr()
        assert Path("out.pth").stat().st_size < 12_000
    else:
        got = safetensors.torch.load_file("out.safetensors")
    same(got, model().state_dict())
    loaded = Tied()
    loaded.load_state_dict(got)
    assert loaded.first.weight is loaded.second.weight
    where = "once" if suffix == ".pth" else "in full"
    assert f"tied: 1 tensors are the same as others, and stand there {where}" in answer.out
    assert ("renamed: " in answer.out) == (name in ("the ImageNet example", "compiled"))
    assert ("also there: state_dict_ema" in answer.out) == (name == "timm")
    assert flambeau("verify", f"out{suffix}").code == 0


def test_file_is_what_safetensors_writes() -> None:
    tensors = {
        "b": torch.ones(3, dtype=torch.int64),
        "a": torch.ones(2),
        "c": torch.ones(5, dtype=torch.bool),
    }
    write_weights(tensors, Path("ours.safetensors"))
    assert Path("ours.safetensors").read_bytes() == safetensors.torch.save(
        tensors, {"format": "pt"}
    )


def test_whole_model_without_running_it(flambeau: Any) -> None:
    torch.save(nn.DataParallel(model()), "whole.pth")
    refused = flambeau("convert", "whole.pth", "out.safetensors")
    assert refused.code == 2
    assert "DataParallel" in refused.err
    assert "--drop-objects" in refused.err
    assert not Path("out.safetensors").exists()
    answer = flambeau("convert", "whole.pth out.safetensors --drop-objects")
    assert answer.code == 0
    assert "left out, and not run: torch.nn.parallel.data_parallel.DataParallel" in answer.out
    same(safetensors.torch.load_file("out.safetensors"), model().state_dict())


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_dtypes(flambeau: Any, dtype: str) -> None:
    torch.save(model().state_dict(), "in.pth")
    assert flambeau("convert", "in.pth out.safetensors --dtype", dtype).code == 0
    wanted = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    expected = {
        n: t.to(wanted) if t.is_floating_point() else t for n, t in model().state_dict().items()
    }
    same(safetensors.torch.load_file("out.safetensors"), expected)


@pytest.mark.parametrize("out", ["out.safetensors", "out.pth"])
def test_a_name_that_is_no_text_is_refused(flambeau: Any, out: str) -> None:
    torch.save({"\udc80.weight": torch.ones(2)}, "odd.pth", pickle_protocol=4)
    code, _, err = flambeau("convert", f"odd.pth {out}")
    assert code == 2
    assert "is no text that a file could hold" in err
    assert not Path(out).exists()


def test_fp16_that_overflows_is_refused_and_infinities_stay(flambeau: Any) -> None:
    torch.save({"mask": torch.tensor([0.0, -torch.inf])}, "mask.pth")
    assert flambeau("convert", "mask.pth mask.safetensors --dtype fp16").code == 0
    torch.save({"big": torch.tensor([1e6])}, "big.pth")
    assert (
        "big has values that torch.float16 cannot hold"
        in flambeau("convert", "big.pth big.safetensors --dtype fp16").err
    )
    assert flambeau("convert", "big.pth big.safetensors --dtype bf16").code == 0
    torch.save({"big": torch.tensor([1e300], dtype=torch.float64)}, "wide.pth")
    assert "--dtype bf16 can" not in flambeau("convert", "wide.pth b.safetensors --dtype fp16").err
    torch.save({"w": torch.tensor([torch.nan, 1]).to(torch.float8_e4m3fn)}, "f8.pth")
    assert flambeau("convert", "f8.pth f8.safetensors --dtype fp16").code == 0


def test_the_counter_of_averaged_weights_is_left_out(flambeau: Any) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    torch.save(averaged.state_dict(), "in.pth")
    answer = flambeau("convert", "in.pth out.safetensors")
    assert "left out: n_averaged" in answer.out
    assert "renamed: 2 tensors without their prefix, such as module.weight to weight" in answer.out
    assert safetensors.torch.load_file("out.safetensors").keys() == {"weight", "bias"}


def test_keys_and_prefixes_of_ones_own(flambeau: Any) -> None:
    lightning = {
        "state_dict": {"model.w": torch.ones(1), "loss.w": torch.ones(2)},
        "ema": {"w": torch.zeros(1)},
    }
    torch.save(lightning, "in.ckpt")
    assert flambeau("convert", "in.ckpt a.safetensors --strip model.").code == 0
    assert safetensors.torch.load_file("a.safetensors").keys() == {"w", "loss.w"}
    assert flambeau("convert", "in.ckpt b.safetensors --key ema").code == 0
    assert safetensors.torch.load_file("b.safetensors")["w"].item() == 0
    assert (
        "there are: state_dict, ema" in flambeau("convert", "in.ckpt c.safetensors --key net").err
    )
    assert "no name begins with 'x.'" in flambeau("convert", "in.ckpt c.safetensors --strip x.").err


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth"])
def test_others_may_read_what_is_written_and_it_is_synced(name: str) -> None:
    """The safetensors library puts a private file that is not synced in the place of ours."""
    synced = []

    class Noting(Disk):
        def sync(self, file: int) -> None:
            synced.append(os.fstat(file).st_ino)
            super().sync(file)

    write_weights({"a": torch.ones(3)}, Path(name), disk=Noting())
    Path("plain").touch()
    assert Path(name).stat().st_ino in synced
    assert Path(name).stat().st_mode == Path("plain").stat().st_mode


def test_nothing_is_replaced_unasked_and_a_full_disk_leaves_nothing(flambeau: Any) -> None:
    torch.save({"w": torch.ones(1)}, "in.pth")
    Path("out.safetensors").write_bytes(b"mine")
    assert "--force" in flambeau("convert", "in.pth out.safetensors").err
    assert Path("out.safetensors").read_bytes() == b"mine"

    class Fails(Disk):
        def __init__(self, failure: BaseException) -> None:
            self.failure, self.left = (
                failure,
                3000,
            )  # bytes that still fit: the failure comes midway

        def write(self, file: int, data: memoryview) -> int:
            self.left -= len(data)
            if self.left < 0:
                raise self.failure
            return super().write(file, data)

        def sync(self, file: int) -> None:  # safetensors writes by itself
            raise self.failure

    for out in ("out.safetensors", "out.pth"):
        full = Fails(OSError(28, "No space left on device"))
        with pytest.raises(OSError, match=f"No space left on device.*{out}"):
            write_weights({"w": torch.ones(2000)}, Path(out), force=True, disk=full)
        with pytest.raises(KeyboardInterrupt):
            write_weights(
                {"w": torch.ones(2000)}, Path(out), force=True, disk=Fails(KeyboardInterrupt())
            )
    assert sorted(p.name for p in Path().iterdir()) == ["in.pth", "out.safetensors"]
    assert flambeau("convert", "in.pth out.safetensors --force").code == 0
    assert "OUT must end with" in flambeau("convert", "in.pth out.txt").err
    assert "does not exist" in flambeau("convert", "no.pth out.safetensors --force").err


def test_folders_of_flambeau(flambeau: Any) -> None:
    weights = {"w": torch.ones(2)}
    files = {
        "model.safetensors": weights_bytes(weights),
        "ema.safetensors": weights_bytes({"w": torch.zeros(2)}),
        "training_state.pt": to_bytes({}),
    }
    save_checkpoint(Path("run/checkpoints/step-00000007"), files, meta={})
    Path("run/config.toml").write_text("", encoding="utf-8")
    for place in ("run", "run/checkpoints/step-00000007"):
        assert flambeau("convert", place, "a.safetensors --force").code == 0
        assert not safetensors.torch.load_file("a.safetensors")["w"].any()  # as predict takes them
        assert flambeau("convert", place, "a.safetensors --force --key model").code == 0
        assert safetensors.torch.load_file("a.safetensors")["w"].all()
    Path("empty").mkdir()
    assert flambeau("convert", "empty b.safetensors").code == 2


def test_a_full_disk_is_told_as_such(run_python: Any) -> None:
    """Of a file that safetensors itself writes: its error has no number, only text."""
    script = """
import resource, signal
from pathlib import Path
import torch
from flambeau.weights.writer import write_weights
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_weights({"w": torch.ones(1 << 20)}, Path("a.safetensors"))
except OSError as error:
    print(error.errno, error.filename)
"""
    done = run_python("-c", script)
    assert (done.returncode, done.stdout) == (0, f"{errno.EFBIG} a.safetensors\n")
    assert not list(Path().iterdir())


def test_models_in_several_files(flambeau: Any) -> None:
    safetensors.torch.save_file({"a": torch.ones(1), "b": torch.ones(1)}, "one.safetensors")
    torch.save({"b": torch.zeros(1), "a": torch.zeros(1), "args": Tied}, "two.bin")
    index = {"weight_map": {"b": "two.bin", "a": "one.safetensors"}}
    Path("model.index.json").write_text(json.dumps(index), encoding="utf-8")
    answer = flambeau("convert", "model.index.json out.safetensors --drop-objects")
    assert answer.code == 0
    assert "left out, and not run: " in answer.out
    assert "test_convert_and_verify_weights.Tied" in answer.out
    got = safetensors.torch.load_file("out.safetensors")
    assert {name: float(got[name]) for name in sorted(got)} == {
        "a": 1,
        "b": 0,
    }  # each from its file
    for name in ("../one.safetensors", "..", "", "model.index.json", 5, "gone.bin"):
        Path("model.index.json").write_text(
            json.dumps({"weight_map": {"a": name}}), encoding="utf-8"
        )
        answer = flambeau("convert", "model.index.json b.safetensors")
        assert answer.code == 2
        assert "model.index.json lists" in answer.err


# ---------------------------------------------------------------- verify


def test_verify_says_what_a_pickle_would_run(flambeau: Any) -> None:
    Path("evil.pth").write_bytes(b"cos\nmkdir\n(X\x06\x00\x00\x00canarytR.")
    answer = flambeau("verify", "evil.pth")
    assert answer.code == 1
    assert "would run or import: os.mkdir" in answer.out
    assert not Path("canary").exists()
    facts = json.loads(flambeau("verify", "evil.pth --json").out)
    assert facts["would_run"] == ["os.mkdir"]
    assert facts["weights_only"] is False


def test_verify_of_names_that_cannot_be_listed(flambeau: Any) -> None:
    torch.save({"x" * 3000: torch.ones(1)}, "a.pth")
    answer = flambeau("verify", "a.pth")
    assert answer.code == 1
    assert "names are too long" in answer.out


def test_verify_counts_what_is_not_finite(flambeau: Any) -> None:
    tensors = {"w": torch.tensor([1, torch.nan, torch.inf]), "mask": torch.tensor([-torch.inf, 0])}
    for name in ("a.pth", "a.safetensors"):
        write_weights(tensors, Path(name))
        answer = flambeau("verify", name)
        assert answer.code == 1
        assert "w: 1 NaN, 1 infinite" in answer.out
        assert "mask: 0 NaN, 1 infinite" in answer.out
    write_weights({"mask": tensors["mask"]}, Path("b.pth"))
    answer = flambeau("verify", "b.pth")
    assert answer.code == 0
    assert "safe to load with weights_only=True" in answer.out


def test_verify_of_a_cut_file_of_images(flambeau: Any) -> None:
    """The tool that may still get something out of it is named; it does what the message says."""
    images = torch.randint(0, 256, (4, 8, 8), dtype=torch.uint8)
    torch.save({"labels": torch.arange(4), "images": images}, "a.pth")
    whole = Path("a.pth").read_bytes()
    Path("a.pth").write_bytes(whole[: whole.index(b"PK\1\2")])
    answer = flambeau("verify a.pth")
    assert (answer.code, "`zip -FF CUT.pth --out NEW.pth`" in answer.out) == (1, True)
    answer = flambeau("verify a.pth --salvage good.pth")
    assert (answer.code, "holds weights or is damaged" in answer.err) == (2, True)
    if shutil.which("zip"):
        subprocess.run(["zip", "-FF", "a.pth", "--out", "b.pth"], input=b"y\n", check=True)
        assert torch.equal(torch.load("b.pth")["images"], images)


def test_verify_finds_a_bit_that_torch_does_not(flambeau: Any) -> None:
    torch.save({"w": torch.arange(1000.0)}, "a.pth")
    data = bytearray(Path("a.pth").read_bytes())
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 1234] ^= 1
    Path("a.pth").write_bytes(data)
    torch.load("a.pth", weights_only=True)
    answer = flambeau("verify", "a.pth")
    assert answer.code == 1
    assert "CRC-32 differs" in answer.out
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(1000.0)}, "b.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert flambeau("verify", "b.pth").code == 0


def test_images_stay_images(flambeau: Any) -> None:
    images = torch.zeros(4, 8, 8, dtype=torch.uint8)
    for number, saved in enumerate(
        [
            {"images": images, "labels": torch.arange(4)},
            (images, torch.arange(4)),
            {"x_train": images.float()},
        ]
    ):
        torch.save(saved, f"{number}.pth")
        assert not is_weights(Path(f"{number}.pth"))
    assert "4 images, all whole" in flambeau("verify", "0.pth").out
    assert "is for packed images" in _weights_with_flag(flambeau)


def _weights_with_flag(flambeau: Any) -> str:
    torch.save({"w": torch.ones(1)}, "w.pth")
    return str(flambeau("verify", "w.pth --deep").err)


HEADERS = {
    "invalid offset for tensor `b`": {"a": ["F32", [1], [0, 4]], "b": ["F32", [1], [2, 6]]},
    "invalid offset for tensor `a`": {"a": ["F32", [1], [4, 8]]},
    "truncated: its tensors end at byte 473 of 81": {"a": ["F32", [100], [0, 400]]},
    "invalid shape, data type": {"a": ["F32", [2], [0, 4]], "b": ["F32", [1], [4, 8]]},
    "unknown variant `F33`": {"a": ["F33", [2], [0, 8]]},
    "the tensor 'a' has the shape [-2], which no tensor can have": {"a": ["F32", [-2], [0, 8]]},
    "the tensor 'a' has the data_offsets [8, 0]; a start": {"a": ["F32", [2], [8, 0]]},
    "not fully covered": {"a": ["F32", [1], [0, 4]]},
    "has the shape [0, 9223372036854775808], which no tensor can have": {
        "a": ["F32", [0, 1 << 63], [0, 0]],
        "b": ["F32", [2], [0, 8]],
    },
    "overflow computing": {"a": ["F32", [1 << 40, 1 << 40, 0], [0, 0]], "b": ["F32", [2], [0, 8]]},
}


@pytest.mark.parametrize("message", HEADERS)
def test_headers_of_safetensors_that_lie(flambeau: Any, message: str) -> None:
    keys = ("dtype", "shape", "data_offsets")
    header = {name: dict(zip(keys, entry, strict=True)) for name, entry in HEADERS[message].items()}
    text = json.dumps(header).encode()
    Path("a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    answer = flambeau("verify", "a.safetensors")
    assert answer.code == 1
    assert message in answer.out
    with pytest.raises((safetensors.SafetensorError, TypeError)):
        safetensors.torch.load_file("a.safetensors")
    answer = flambeau("convert", "a.safetensors b.safetensors")
    assert answer.code == 2
    assert message in answer.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is nested too deeply"),
        (b'{"__metadata__":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "is nested too deeply"),
        (b'{"a":' + b"9" * 5000 + b"}", "a number of thousands of digits"),
        (b'{"a\xff":1}', "no UTF-8"),
        (b"[1,2]", "no table of tensors"),
        (b'{"a":', "no JSON"),
    ],
    ids=["deep", "deep metadata", "digits", "bytes", "list", "cut"],
)
def test_headers_that_are_no_table_of_tensors(flambeau: Any, text: bytes, message: str) -> None:
    Path("a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    for line in ("verify a.safetensors", "convert a.safetensors b.pth"):
        verb, _, words = line.partition(" ")
        answer = flambeau(verb, words)
        assert message in answer.out + answer.err
        for word in ("recursion", "sys.set_int", "codec"):
            assert word not in answer.out + answer.err


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth", "a.pkl"])
def test_a_file_of_zeros(flambeau: Any, name: str) -> None:
    Path(name).write_bytes(bytes(10_000))
    answer = flambeau("verify", name)
    assert (answer.code, "DAMAGED: this is a file of zeros" in answer.out) == (1, True)
    answer = flambeau("convert", f"{name} b.safetensors")
    assert (answer.code, "is a file of zeros" in answer.err) == (2, True)


def test_a_wrong_checksum_does_not_hide_what_would_run(flambeau: Any) -> None:
    layer = nn.Linear(30, 30)
    torch.save(layer, "a.pth")
    data = bytearray(Path("a.pth").read_bytes())
    data[data.index(layer.weight.detach().numpy().tobytes())] ^= 1
    Path("a.pth").write_bytes(data)
    answer = flambeau("verify", "a.pth")
    assert (answer.code, "CRC-32 differs" in answer.out) == (1, True)
    assert "torch.nn.modules.linear.Linear" in answer.out


def test_many_small_things_cost_little_memory() -> None:
    """Before, 950 bytes per empty set, and 790 per tensor."""
    Path("a.pkl").write_bytes(b"\x80\x04](" + b"\x8f" * 20_000 + b"e.")
    entry = {"dtype": "F32", "shape": [1]}
    header = {f"t{n}": {**entry, "data_offsets": [4 * n, 4 * n + 4]} for n in range(20_000)}
    text = json.dumps(header).encode()
    Path("a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(80_000))
    for name, most in (("a.pkl", 600), ("a.safetensors", 500)):
        tracemalloc.start()
        report = report_weights(Path(name))
        peak = tracemalloc.get_traced_memory()[1] / 20_000
        tracemalloc.stop()
        assert report.good
        assert peak < most, f"{name}: {peak} bytes each"


def test_a_name_that_stands_twice_is_damage(flambeau: Any) -> None:
    entry = b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    text = b"{" + entry + b"," + entry + b"}"
    Path("a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    answer = flambeau("verify", "a.safetensors")
    assert (answer.code, "it gives 'a' twice" in answer.out) == (1, True)


def test_many_small_tensors_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a header can name, which one by one take a minute; each that is not finite is named."""
    tensors = {f"layer.{n}": torch.full((2,), float(n)) for n in range(3000)}
    tensors["layer.1500"][1], tensors["layer.2999"][0] = torch.nan, torch.inf
    tensors["half"] = torch.tensor([-torch.inf, 1]).half()
    write_weights(tensors, Path("a.safetensors"))
    calls = []
    isfinite = torch.isfinite
    monkeypatch.setattr(torch, "isfinite", lambda t: calls.append(len(t)) or isfinite(t))  # type: ignore[func-returns-value]
    report = report_weights(Path("a.safetensors"))
    assert report.not_finite == {"layer.1500": (1, 0), "layer.2999": (0, 1), "half": (0, 1)}
    assert len(calls) < 2100  # two groups of a thousand hold one, one by one


@pytest.mark.parametrize(
    "data",
    [b"", b"\x05", b"\xff" * 20, b"\x02" + bytes(7) + b"[]", b"\x01" + bytes(7) + b"{", b'"' * 99],
)
def test_heads_that_are_none(flambeau: Any, data: bytes) -> None:
    Path("a.safetensors").write_bytes(data)
    assert flambeau("verify", "a.safetensors").code == 1
    assert flambeau("convert", "a.safetensors b.safetensors").code == 2


@pytest.mark.parametrize("num_files", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["a.safetensors", "a.pth", "legacy.pth"])
def test_damaged_files_are_named_and_never_a_crash(
    flambeau: Any, name: str, num_files: int
) -> None:
    if name == "legacy.pth":
        torch.save(model().state_dict(), name, _use_new_zipfile_serialization=False)
    else:
        write_weights(model().state_dict(), Path(name))
    whole, generator = Path(name).read_bytes(), np.random.default_rng(0)
    codes = []
    for number in range(num_files):
        data = bytearray(
            whole[: generator.integers(1, len(whole))] if generator.random() < 0.4 else whole
        )
        for place in generator.integers(0, len(data), generator.integers(1, 4)):
            data[place] = generator.integers(256)
        Path(name).write_bytes(data)
        codes.append(flambeau("verify", name).code)
        if number % 5 == 0:
            assert flambeau("convert", name, "out.safetensors --force").code in (0, 2)
    assert set(codes) <= {0, 1}
    assert codes.count(1) > 0.45 * num_files


# ---------------------------------------------------------------- what a newcomer met


def test_a_flipped_bit_is_not_converted(flambeau: Any) -> None:
    torch.save({"w": torch.arange(1000.0)}, "a.pth")
    data = bytearray(Path("a.pth").read_bytes())
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 1234] ^= 1
    Path("a.pth").write_bytes(data)
    answer = flambeau("convert a.pth out.safetensors")
    assert answer.code == 2
    assert "record 'a/data/0'" in answer.err
    assert not Path("out.safetensors").exists()


def test_what_is_no_plain_tensor_is_named(flambeau: Any) -> None:
    whole = {"w": torch.eye(3).to_sparse(), "v": torch.ones(2), "n": np.ones(2)}
    torch.save({"model": whole}, "a.pth")
    verdict = flambeau("verify a.pth").out
    assert "not read here: a sparse tensor\n" in verdict
    assert "NOT safe" not in verdict
    assert flambeau("convert a.pth out.pth").code == 2
    answer = flambeau("convert a.pth out.pth --drop-objects")
    assert "model.w (a sparse tensor), model.n (a NumPy array)" in answer.out
    assert torch.load("out.pth", weights_only=True).keys() == {"v"}


def quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to give quantization up
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


NOT_READ: dict[str, Callable[[], Any]] = {
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "a tensor on meta": lambda: torch.empty(3, device="meta"),
    "a quantized tensor": quantized,
    "conjugated, negated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "the NumPy dtype 'O8'": lambda: np.array([1, "a", None], dtype=object),
    "the NumPy dtype 'V12'": lambda: np.zeros(3, dtype=[("a", "f4"), ("b", "i8")]),
    "the NumPy dtype 'M8'": lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", NOT_READ)
def test_what_is_not_read_is_neither_damage_nor_an_object(flambeau: Any, what: str) -> None:
    """The weights beside it are taken, and it is named; what torch reads is said to be read by torch."""
    torch.save({"w": torch.ones(2, 3), "x": NOT_READ[what]()}, "a.pth")
    answer = flambeau("verify a.pth")
    assert answer.code == 0
    assert "not read here: " in answer.out
    assert what in answer.out
    assert "1 tensors, 24 bytes" in answer.out
    assert ("safe to load with weights_only=True" in answer.out) == ("NumPy" not in what)
    refused = flambeau("convert a.pth b.safetensors")
    assert (refused.code, what in refused.err, "--drop-objects" in refused.err) == (2, True, True)
    answer = flambeau("convert a.pth b.safetensors --drop-objects")
    assert (answer.code, f"x ({what}" in answer.out or what in answer.out) == (0, True)
    assert safetensors.torch.load_file("b.safetensors").keys() == {"w"}


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_bare_storages_and_expanded_tensors_come_along(flambeau: Any, suffix: str) -> None:
    saved = {
        "w": torch.ones(1).expand(8),
        "s": torch.arange(3.0).storage(),
        "t": torch.arange(2.0, 4.0).storage(),
        "u": torch.arange(3, dtype=torch.uint8).untyped_storage(),
    }
    torch.save(saved, "a.pth")
    assert "4 tensors" in flambeau("verify a.pth").out
    assert flambeau("convert", f"a.pth b{suffix}").code == 0
    load = safetensors.torch.load_file if suffix != ".pth" else torch.load
    expected = {"w": torch.ones(8), "s": torch.arange(3.0), "t": torch.arange(2.0, 4.0)}
    same(load(f"b{suffix}"), {**expected, "u": torch.arange(3, dtype=torch.uint8)})


def test_tar_files_of_the_first_torch_are_named(flambeau: Any) -> None:
    with tarfile.open("a.pth", "w") as archive:
        archive.add(__file__, "storages")
    answer = flambeau("verify a.pth")
    assert (answer.code, "a tar archive, as torch.save wrote before" in answer.out) == (1, True)
    assert "DAMAGED" not in answer.out
    assert "a tar archive" in flambeau("convert a.pth b.pth").err


def test_a_prefix_goes_with_its_dot(flambeau: Any) -> None:
    torch.save({"model.conv1.weight": torch.ones(1), "model_ema.w": torch.ones(2)}, "in.pth")
    assert flambeau("convert in.pth a.safetensors --strip model").code == 0
    got = safetensors.torch.load_file("a.safetensors")
    assert got.keys() == {"conv1.weight", "model_ema.w"}
    assert "would have none" in flambeau("convert in.pth b.pth --strip model_ema.w").err


def test_several_weights_without_a_known_key_are_asked_for(flambeau: Any) -> None:
    gan = {"generator": {"w": torch.ones(1)}, "discriminator": {"w": torch.zeros(1)}}
    torch.save(gan, "gan.pth")
    answer = flambeau("convert gan.pth out.safetensors")
    assert answer.code == 2
    assert "generator, discriminator\n" in answer.err
    assert "--key generator" in answer.err
    assert flambeau("convert gan.pth out.safetensors --key discriminator").code == 0
    assert safetensors.torch.load_file("out.safetensors")["w"].item() == 0


def test_arrays_by_name_are_weights_and_verify_agrees(flambeau: Any) -> None:
    arrays = {"w": np.arange(6, dtype=">f4").reshape(2, 3), "names": np.array(["a"])}
    Path("py2.pkl").write_bytes(pickle.dumps({"params": arrays, "lr": 0.1}, 2))
    assert (
        "1 tensors, 24 bytes (pickle), whole, runs no code: `fl" in flambeau("verify py2.pkl").out
    )
    assert flambeau("convert py2.pkl out.safetensors").code == 0
    same(safetensors.torch.load_file("out.safetensors"), {"w": torch.arange(6.0).reshape(2, 3)})
    Path("none.pkl").write_bytes(pickle.dumps({"lr": 0.1}))
    assert "runs no code: no weights in it by name" in flambeau("verify none.pkl").out
    assert "no weights by name" in flambeau("convert none.pkl out2.safetensors").err
    Path("evil.pkl").write_bytes(b"cos\nmkdir\n(X\x06\x00\x00\x00canarytR.")
    assert "NOT safe to unpickle: no weights" in flambeau("verify evil.pkl").out


@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\n<!DOCTYPE html>", "web"),
    ],
)
def test_files_that_a_download_left(flambeau: Any, name: str, head: bytes, message: str) -> None:
    Path(name).write_bytes(head + b"more\n" * 50)
    answers = flambeau("verify", name), flambeau("convert", name, "out.pth")
    assert [answer.code for answer in answers] == [1, 2]
    assert message in answers[0].out
    assert message in answers[1].err


def test_names_are_fit_for_a_terminal(flambeau: Any) -> None:
    torch.save({"module.\x1b[2K": torch.tensor([torch.nan])}, "a.pth")
    shown = flambeau("verify a.pth").out + flambeau("convert a.pth b.safetensors").out
    assert r"module.\x1b[2K: 1 NaN" in shown
    assert r"module.\x1b[2K to \x1b[2K" in shown
    assert "\x1b" not in shown


def test_float4_is_counted_and_not_converted(flambeau: Any) -> None:
    weights = torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.save({"a": weights}, "f4.pth")
    assert "1 tensors, 4 bytes (zip), whole" in flambeau("verify f4.pth").out
    assert flambeau("convert f4.pth same.pth").code == 0
    answer = flambeau("convert f4.pth o.safetensors --dtype fp32")
    assert answer.code == 2
    assert "a is of torch.float4_e2m1fn_x2, which torch cannot convert" in answer.err


def test_a_list_of_state_dicts_is_weights(flambeau: Any) -> None:
    torch.save([{"w": torch.randn(4, 4)}, {"w": torch.tensor([1.0, float("nan")])}], "l.pth")
    code, out, _ = flambeau("verify l.pth")
    assert code == 1
    assert "1 NaN" in out
    assert "DAMAGED" not in out


def test_a_pipe_is_not_waited_for(flambeau: Any) -> None:
    os.mkfifo("x.pth")
    answer = flambeau("convert x.pth o.safetensors")
    assert (answer.code, answer.err) == (
        2,
        "flambeau: x.pth is a pipe, and no file: write it to a file first\n",
    )
