"""Whole files in the place of weights: read, or called what they are, and never damaged."""

import errno
import gzip
import json
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from flambeau.recipes.checkpoints import safe_pickle
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk
from flambeau.run.run import Run
from flambeau.trainer.parts.fine_tuning import load_weights


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def weights() -> dict[str, Tensor]:
    return {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)}


def same(path: str, expected: dict[str, Tensor]) -> None:
    got = safetensors.torch.load_file(path)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0)


def exported(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(nn.Linear(2, 3).eval(), (torch.zeros(1, 2),))
        torch.export.save(program, "whole.pt2")
    Path("whole.pt2").rename(name)


def compressed(name: str) -> None:
    torch.save(weights(), "plain.pth")
    with (
        zipfile.ZipFile("plain.pth") as old,
        zipfile.ZipFile(name, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))


def zipped(name: str) -> None:
    torch.save(weights(), "plain.pth")
    with zipfile.ZipFile(name, "w") as archive:
        archive.write("plain.pth")
        archive.writestr("readme.txt", "read me")


def numpy_archive(name: str) -> None:
    with Path(name).open("wb") as file:
        np.savez(file, w=np.ones(2))


def hdf5(name: str) -> None:
    with pytest.importorskip("h5py").File(name, "w") as file:
        file["w"] = np.ones(2)


def of(data: bytes) -> Callable[[str], object]:
    return lambda name: Path(name).write_bytes(data)


# What a file is, by its name: how it is made, and what is said of it.
WHOLE: dict[str, tuple[Callable[[str], object], str]] = {
    "export.pt": (exported, "a program of torch.export: torch.save(torch.export.load(FILE).state_dict"),
    "export.pt2": (exported, "a program of torch.export"),
    "compressed.pth": (compressed, "a file of torch.save that was compressed afterwards: torch.save("),
    "zipped.pth": (zipped, "a zip archive around 'plain.pth' and 1 more, and no file of torch.save"),
    "numpy.pth": (numpy_archive, "an archive of NumPy (.npz): name it NAME.npz"),
    "keras.pth": (hdf5, "an HDF5 file, as Keras saves weights: h5py reads it"),
    "gzip.pth": (of(gzip.compress(b"x")), "a gzip file: unpack it with `gzip -dc gzip.pth > NEW.pth`"),
    "json.pth": (of(b'{"error": "not found"}'), "a JSON text"),
    "text.pth": (of(b"Entry not found"), "a text that begins with 'Entry not found'"),
    "text2.safetensors": (of(b"Not Found"), "a text that begins with 'Not Found'"),
    "onnx.pth": (of(b"\x08\x0a\x12\x07pytorch\x1a\x062.15.0:\x05\x0a\x03abc"), "a model of ONNX"),
    "model.onnx": (of(b"\x08\x0a\x12\x07pytorch\x1a\x062.15.0:\x05\x0a\x03abc"), "a model of ONNX"),
    "annex.pth": (of(b"/annex/objects/MD5E-s5--4d7a.pth\n"), "a pointer of git-annex"),
    "lfs.npz": (of(b"version https://git-lfs.github.com/spec/v1\n"), "a pointer of Git LFS"),
    "link.pth": (lambda name: Path(name).symlink_to(".git/annex/objects/a/b"), "git annex get"),
    "empty.pth": (of(b""), "an empty file: copy or download it again"),
    "empty.safetensors": (of(b""), "an empty file: copy or download it again"),
    "empty.npz": (of(b""), "an empty file: copy or download it again"),
    "many.pth": (of(pickle.dumps([[] for _ in range(5001)])), "too large to be checked: it makes over"),
    "other.pth": (of(b"\xd7\x01" * 50), "of no kind that is known here (it begins with the bytes d7 01"),
    "array.npy": (lambda name: np.save(name, np.ones((2, 3))), "one array of NumPy, without a name"),
    "dict.npy": (lambda name: np.save(name, {"w": 1}, allow_pickle=True), "one array of NumPy"),  # type: ignore[arg-type]
    "model.index.json": (of(b'{"weight_map": {}}'), "an index of several files of weights: verify each"),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_whole_files_are_called_what_they_are(
    flambeau: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_pickle, "_MAX_MADE", 5000)  # a million take seconds
    make, said = WHOLE[name]
    make(name)
    answer = flambeau("verify", name)
    assert answer.code == 1, answer
    assert f"{name}, NOT READ: this is " in answer.out
    assert said in answer.out
    assert answer.out.endswith("NOT READ\n")
    assert "DAMAGED" not in answer.out + answer.err
    facts = json.loads(flambeau("verify", name, "--json").out)
    assert (facts["damaged"], facts["good"], said in facts["other"]) == ([], False, True)
    answer = flambeau("convert", name, "out.safetensors")
    assert (answer.code, Path("out.safetensors").exists()) == (2, False)
    assert said in answer.err or "its weight_map is empty" in answer.err
    assert f"flambeau: {name} " in answer.err


def test_a_list_of_a_tensor_and_a_dict_is_no_set_of_images(flambeau: Any) -> None:
    inner = {"a": torch.ones(2)}
    for number, saved in enumerate(([torch.ones(3), inner], [[torch.ones(3)], [inner]])):
        torch.save(saved, f"{number}.pth")
        answer = flambeau("verify", f"{number}.pth")
        assert (answer.code, "2 tensors, 20 bytes (zip), whole" in answer.out) == (0, True)
        assert "image" not in answer.out


def test_torchscript_is_told_by_the_function_that_reads_it(flambeau: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in torch 2.15, and what users have
        torch.jit.script(nn.Linear(2, 2)).save("a.pt")
    answer = flambeau("verify", "a.pt")
    assert (answer.code, "torch.jit.load" in answer.out) == (1, True)
    answer = flambeau("convert", "a.pt b.safetensors")
    assert (answer.code, "torch.jit.load" in answer.err) == (2, True)
    assert flambeau("convert", "a.pt b.safetensors --drop-objects").code == 0


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.pth", b"(dp0\nS'caf'\np1\n(lp2\n"),  # of protocol 0, cut short: it is text
        ("a.pth", b"\x80\x02}q\x00(X"),
        ("a.pth", bytes(100)),
        ("a.safetensors", bytes(100)),
        ("a.npz", b"PK\3\4" + bytes(100)),
    ],
)
def test_what_is_damaged_is_said_to_be(flambeau: Any, name: str, data: bytes) -> None:
    Path(name).write_bytes(data)
    answer = flambeau("verify", name)
    assert (answer.code, "DAMAGED" in answer.out, "NOT READ" in answer.out) == (1, True, False)
    assert flambeau("convert", name, "out.safetensors").code == 2


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load of 2.11
def test_what_is_said_to_be_done_can_be_done(flambeau: Any) -> None:
    exported("a.pt")
    torch.save(torch.export.load("a.pt").state_dict, "from_export.pth")
    compressed("b.pth")
    torch.save(torch.load("b.pth", weights_only=True), "anew.pth")
    np.save("c.npy", np.ones((2, 3), np.float32))
    np.savez("named.npz", w=np.load("c.npy"))
    for name in ("from_export.pth", "anew.pth", "named.npz"):
        assert flambeau("verify", name).code == 0
        assert flambeau("convert", name, "out.safetensors --force").code == 0


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_an_npz_are_weights(flambeau: Any, save: Any) -> None:
    arrays = {name: tensor.numpy() for name, tensor in weights().items()}
    save("a.npz", **arrays, big_endian=np.arange(3, dtype=">i4"))
    answer = flambeau("verify a.npz")
    assert answer.code == 0
    assert "3 tensors, 44 bytes (npz), whole, runs no code" in answer.out
    assert "no checksums" not in answer.out
    assert flambeau("convert a.npz out.safetensors").code == 0
    same("out.safetensors", {**weights(), "big_endian": torch.arange(3, dtype=torch.int32)})
    assert flambeau("convert a.npz other.safetensors --key w").code == 2
    save("b.npz", **arrays, names=np.array(["a"]), objects=np.array([1, None], dtype=object))
    answer = flambeau("verify b.npz")
    assert (answer.code, "not read here: Python objects or records: |O" in answer.out) == (0, True)
    answer = flambeau("convert b.npz out2.safetensors")
    assert (answer.code, "names (a NumPy array), objects (Python objects" in answer.err) == (
        2,
        True,
    )
    answer = flambeau("convert b.npz out2.safetensors --drop-objects")
    assert "no tensor made of: names (a NumPy array), objects" in answer.out
    same("out2.safetensors", weights())
    save("c.npz", w=np.array([1, np.nan], np.float32))
    assert "w: 1 NaN" in flambeau("verify c.npz").out


def test_damage_of_an_npz_is_found(flambeau: Any) -> None:
    np.savez("a.npz", w=np.arange(1000.0))
    whole = Path("a.npz").read_bytes()
    place = whole.index(np.arange(1000.0).tobytes())
    flipped = bytearray(whole)
    flipped[place + 123] ^= 1
    lying = whole.replace(b"(1000,)", b"(9000,)")
    for data, what in (
        (flipped, "Bad CRC-32"),
        (lying, "has not the bytes"),
        (whole[:-9], "no .npz"),
        (whole.replace(b"'<f8'", b"'<f/'"), "has a type that NumPy lacks: '<f/'"),
    ):
        Path("a.npz").write_bytes(data)
        answer = flambeau("convert a.npz out.safetensors")
        assert (answer.code, what in answer.err) == (2, True), answer
        assert flambeau("verify a.npz").code == 1


def test_an_npz_or_npy_of_images_stays_one(flambeau: Any) -> None:
    images = np.zeros((4, 8, 8), np.uint8)
    np.savez("a.npz", images=images, labels=np.arange(4))
    np.savez("b.npz", images)
    np.save("c.npy", images)
    np.save("c_labels.npy", np.arange(4))
    assert "4 images, all whole" in flambeau("verify a.npz").out
    assert "it has arr_0 (4, 8, 8) uint8" in flambeau("verify b.npz").out
    assert "4 images, all whole" in flambeau("verify c.npy").out


def test_an_npz_larger_than_the_memory_is_refused(
    flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed("a.npz", w=np.zeros(1_000_000))
    monkeypatch.setattr(os, "sysconf", lambda name: 1000)
    answer = flambeau("convert a.npz out.safetensors")
    assert (answer.code, "takes 8000128 bytes of memory; there are 1000000" in answer.err) == (
        2,
        True,
    )


def test_names_that_say_another_kind(flambeau: Any) -> None:
    """Read by what they hold, and named: others go by the name."""
    safetensors.torch.save_file(weights(), "a.pth")
    torch.save(weights(), "b.safetensors")
    torch.save(weights(), "c.safetensors", _use_new_zipfile_serialization=False)
    for name, kind in (
        ("a.pth", "a safetensors file"),
        ("b.safetensors", "a pickle"),
        ("c.safetensors", "a pickle"),
    ):
        answer = flambeau("verify", name)
        assert (answer.code, f"this is {kind}" in answer.out, "rename it" in answer.out) == (
            0,
            True,
            True,
        )
        assert flambeau("convert", name, "out.safetensors --force").code == 0
        same("out.safetensors", weights())


def test_files_without_checksums_are_said_to_be(flambeau: Any) -> None:
    safetensors.torch.save_file(weights(), "a.safetensors")
    torch.save(weights(), "b.pth", _use_new_zipfile_serialization=False)
    Path("c.pkl").write_bytes(pickle.dumps(weights()))
    torch.save(weights(), "sums.pth")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(weights(), "d.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    for name in ("a.safetensors", "b.pth", "c.pkl", "d.pth"):
        answer = flambeau("verify", name)
        assert (answer.code, "no checksums in this file: changed bytes" in answer.out) == (
            0,
            True,
        ), name
    assert "checksums" not in flambeau("verify sums.pth").out
    assert flambeau("convert c.pkl out.safetensors").code == 0
    same("out.safetensors", weights())


def test_an_index_says_what_it_leaves_out(flambeau: Any) -> None:
    safetensors.torch.save_file(
        {"weight": torch.ones(1, 1), "bias": torch.ones(1)}, "one.safetensors"
    )
    index = Path("model.index.json")
    index.write_text(json.dumps({"weight_map": {"weight": "one.safetensors"}}), encoding="utf-8")
    answer = flambeau("convert model.index.json out.safetensors")
    assert answer.code == 0
    assert "NOT listed by the index, and left out: one.safetensors: bias\n" in answer.out
    told = load_weights(nn.Linear(1, 1), "model.index.json")
    assert "1 not listed by the index, such as one.safetensors: bias" in told
    text = '{"weight_map": {"weight": "one.safetensors", "weight": "two.safetensors"}}'
    index.write_text(text, encoding="utf-8")
    answer = flambeau("convert model.index.json none.safetensors")
    assert (answer.code, "with weight_map): it gives 'weight' twice" in answer.err) == (2, True)
    index.write_text('{"weight_map": {}}', encoding="utf-8")
    answer = flambeau("convert model.index.json none.safetensors")
    assert (answer.code, "lists no weights" in answer.err) == (2, True)
    safetensors.torch.save_file({}, "none.safetensors")
    assert "holds no weights" in flambeau("convert none.safetensors out.pth").err


def test_an_optimizer_saved_whole_is_dropped(flambeau: Any) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, "a.pth")
    answer = flambeau("verify a.pth")
    assert (answer.code, "would run or import: torch.optim.sgd.SGD" in answer.out) == (1, True)
    assert "--drop-objects" in flambeau("convert a.pth out.safetensors").err
    answer = flambeau("convert a.pth out.safetensors --drop-objects")
    assert "left out, and not run: torch.optim.sgd.SGD" in answer.out
    same("out.safetensors", dict(model.state_dict()))


@pytest.mark.parametrize("out", ["out.pth", "out.safetensors"])
def test_half_complex_numbers(out: str, run_python: Any) -> None:
    """torch warns where it makes some, in the first place of a process."""
    script = f"""
import torch, warnings
from pathlib import Path
from flambeau.cli.command import main
from flambeau.recipes.checkpoints.safe_pickle import load_pickle
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    value = torch.arange(8, dtype=torch.float16).view(torch.complex32).reshape(2, 2)
    torch.save({{"w": value.t(), "part": value[1]}}, "a.pth")
code = main(["verify", "a.pth"]), main(["convert", "a.pth", {out!r}])
print(code)
if code[1] == 0:
    print(torch.view_as_real(load_pickle(Path({out!r}))["w"]).transpose(0, 1).flatten(1).tolist())
"""
    done = run_python("-c", script)
    assert "2 tensors, 24 bytes (zip), whole" in done.stdout
    if out == "out.pth":
        assert done.stdout.endswith("(0, 0)\n[[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]\n")
        assert done.stderr == ""
    else:
        assert "(0, 2)\n" in done.stdout
        assert (
            done.stderr
            == "flambeau: safetensors has no type for w of torch.complex32; write a .pth\n"
        )


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("out", ["out.pth", "out.safetensors"])
def test_a_disk_that_refuses_is_told_by_the_name_of_the_file(
    flambeau: Any, monkeypatch: pytest.MonkeyPatch, number: int, out: str
) -> None:
    def refuse(_: Disk, path: Any, *more: Any) -> int:
        raise OSError(number, os.strerror(number), str(path) if isinstance(path, Path) else None)

    torch.save(weights(), "in.pth")
    for operation in ("create", "sync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(Disk, operation, refuse)
            answer = flambeau("convert in.pth", out)
        remedy = "raise the limit (`ulimit -f`)" if number == errno.EFBIG else "fix that"
        said = f"flambeau: {out}: {os.strerror(number)}; {remedy}"
        assert (answer.code, said in answer.err) == (2, True), (operation, answer)
        assert sorted(path.name for path in Path().iterdir()) == ["in.pth"]


def test_a_folder_of_ones_own_loop(flambeau: Any) -> None:
    model = nn.Linear(1, 1)
    data = torch.utils.data.TensorDataset(torch.ones(4, 1))
    Run("mine", model, torch.optim.SGD(model.parameters(), lr=0.1), data, duration="1st").close()
    Path("x.png").write_bytes(b"x")
    for words in ("predict mine x.png", "evaluate mine ."):
        answer = flambeau(words)
        assert answer.code == 2
        assert "mine is of a training loop of your own (the class Run)" in answer.err
        assert "`flambeau convert mine NAME.pth`" in answer.err


def test_what_is_not_there(flambeau: Any) -> None:
    answer = flambeau("verify nothere")
    assert answer.code == 2
    assert answer.err.startswith(
        "flambeau: nothere does not exist\nGive the folder of a run, packed images, or"
    )
    assert "does not exist" in flambeau("verify nothere.pth").err
    assert "does not exist: give" in flambeau("convert nothere out.pth").err


@pytest.mark.parametrize("in_import", [True, False])
def test_ctrl_c_during_an_import(in_import: bool) -> None:
    """Where a package makes an error of its own of it, as NumPy does."""
    Path("slow.py").write_text(
        """
import os, signal, time

def wait():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)

if IN_IMPORT:
    try:
        wait()
    except BaseException as error:
        raise ImportError("Error importing numpy") from error
""".replace("IN_IMPORT", str(in_import)),
        encoding="utf-8",
    )
    script = """
import signal, sys
sys.path.insert(0, "")
from flambeau.cli import command, env

def run(_):
    import slow
    slow.wait()

env.run = run
code = command.main(["env"])
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (130, "flambeau: interrupted\n")
