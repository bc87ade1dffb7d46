"""Exports that came from elsewhere: nothing in them is run, but where the user says so."""

import hashlib
import io
import json
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from flambeau.errors import InputError
from flambeau.exports.formats.plain_graph import plain_graph
from flambeau.exports.formats.pt2_archive import NotPlain, read_archive
from flambeau.exports.formats.pt2_words import check_words
from flambeau.exports.formats.torch_export_file import read_plain
from flambeau.exports.load_export import load_export, verify_export
from flambeau.provenance import UntrustedCode
from flambeau.trainer.prediction.trained_model import load_trained

MODEL, SAMPLE = "models/model.json", "data/sample_inputs/model.pt"
CONSTANTS = "data/constants/model_constants_config.json"
WEIGHTS = "data/weights/model_weights_config.json"
Members = dict[str, bytes]


@pytest.fixture(scope="module")
def export(exported_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export as graph."""
    from flambeau.cli.command import main

    out = tmp_path_factory.mktemp("foreign") / "made"
    assert main(["export", str(exported_run), "--images", "6", "--out", str(out)]) == 0
    return out


class Evil:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return eval, (f"open({str(self.canary)!r}, 'w').close()",)


def saved(what: object) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


def members(path: Path) -> Members:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def packed(found: Members, *, compress: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compress) as archive:
        for name, content in found.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def foreign(export: Path, folder: Path, data: bytes) -> Path:
    """A copy with another model.pt2, and the hash of that in its own list."""
    shutil.copytree(export, folder)
    (folder / "model.pt2").write_bytes(data)
    told = json.loads((folder / "export.json").read_text())
    told["files"]["model.pt2"] = hashlib.sha256(data).hexdigest()
    (folder / "export.json").write_text(json.dumps(told))
    return folder


def in_model(change: Callable[[dict[str, Any], str], None]) -> Callable[[Members, Path], None]:
    """A change of the JSON of the graph; it gets Python that makes the canary."""

    def edit(found: Members, canary: Path) -> None:
        told = json.loads(found[MODEL])
        change(told, f"__import__('pathlib').Path({str(canary)!r}).touch()")
        found[MODEL] = json.dumps(told).encode()

    return edit


def graph_of(told: dict[str, Any]) -> dict[str, Any]:
    graph: dict[str, Any] = told["graph_module"]["graph"]
    return graph


def every_size(told: dict[str, Any], code: str) -> None:
    """Shape expressions, which torch gives to sympy, which evaluates text."""
    for values in (graph_of(told)["tensor_values"], graph_of(told)["sym_int_values"]):
        for name, value in values.items():
            size = {"as_expr": {"expr_str": code, "hint": None}}
            if "sizes" in value:
                value["sizes"] = [size]
            else:
                values[name] = size


def input_name(told: dict[str, Any], code: str) -> None:
    """Names of inputs, which torch writes into Python."""
    name = f"full_size={code}, *"
    text = json.dumps(told).replace('"full_size"', json.dumps(name))
    told.clear()
    told.update(json.loads(text))


def target(name: str, *arguments: dict[str, Any]) -> Callable[[dict[str, Any], str], None]:
    def change(told: dict[str, Any], code: str) -> None:
        inputs = [
            {"name": f"a{number}", "arg": argument, "kind": 1}
            for number, argument in enumerate(arguments or [{"as_string": code}])
        ]
        node = {"target": name, "inputs": inputs, "outputs": [], "metadata": {}, "name": "bad"}
        graph_of(told)["nodes"].insert(0, node)

    return change


def guard(told: dict[str, Any], code: str) -> None:
    told["guards_code"] = [code]


def tree(told: dict[str, Any], code: str) -> None:
    """A default factory of a defaultdict, which is imported by its name."""
    context = {
        "default_factory_module": "evil_module",
        "default_factory_name": "f",
        "dict_context": "[]",
    }
    spec = [
        1,
        {"type": "collections.defaultdict", "context": json.dumps(context), "children_spec": []},
    ]
    for entry in told["graph_module"]["module_call_graph"]:
        if entry["signature"]:
            entry["signature"]["in_spec"] = json.dumps(spec)


def pickled_weight(found: Members, canary: Path) -> None:
    told = json.loads(found[WEIGHTS])
    entry = next(iter(told["config"].values()))
    entry["use_pickle"] = True
    found["data/weights/" + entry["path_name"]] = saved(Evil(canary))
    found[WEIGHTS] = json.dumps(told).encode()


def constant(file: str, content: Callable[[Path], bytes]) -> Callable[[Members, Path], None]:
    def edit(found: Members, canary: Path) -> None:
        told = {
            "config": {
                "bad": {
                    "path_name": file,
                    "is_param": False,
                    "use_pickle": True,
                    "tensor_meta": None,
                }
            }
        }
        found["data/constants/" + file] = content(canary)
        found[CONSTANTS] = json.dumps(told).encode()

    return edit


def old_layout(found: Members, canary: Path) -> None:
    """That of torch before 2.8, which `torch.export.load` reads when the new one fails."""
    program = found[MODEL]
    found.clear()
    found |= {
        "version": b"8.8", "serialized_exported_program.json": program,
        "serialized_state_dict.pt": saved(Evil(canary)), "serialized_constants.pt": saved(Evil(canary)),
        "serialized_example_inputs.pt": saved(Evil(canary)),
    }  # fmt: skip


def member(name: str, content: Callable[[Any], bytes] = saved) -> Callable[[Members, Path], None]:
    """One more member, or another in its place, that holds what runs when it is unpickled."""
    return lambda found, canary: found.update({name: content(Evil(canary))})


KINDS: dict[str, Callable[[Members, Path], None]] = {
    "sample inputs": member(SAMPLE),
    "sample inputs, a bare pickle": member(SAMPLE, pickle.dumps),
    "a pickled weight": pickled_weight,
    "a pickled constant": constant("tensor_0", lambda canary: saved(Evil(canary))),
    "an opaque object": constant("opaque_obj_0", lambda canary: pickle.dumps(Evil(canary))),
    "an object of C++": constant("custom_obj_0", lambda canary: pickle.dumps(Evil(canary))),
    "weights of an older file": member("data/weights/model.pt"),
    "constants of an older file": member("data/constants/model.pt"),
    "a library": member("data/aotinductor/model/a.so", lambda _: b"\x7fELF"),
    "the old layout": old_layout,
    "a shape that is code": in_model(every_size),
    "a name that is code": in_model(input_name),
    "a guard that is code": in_model(guard),
    "a tree that imports": in_model(tree),
    "an attribute of torch": in_model(target("torch.utils.cpp_extension.os.system")),
    "a function of torch": in_model(target("torch.hub.load")),
    "an extension": in_model(target("#aoti:code")),
    "a class of an operator": in_model(target("torch.ops.aten.add.__class__")),
    "an operator of another library": in_model(target("torch.ops.load_library")),
    "getitem": in_model(target("_operator.attrgetter")),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_a_foreign_file_runs(
    export: Path, exported_run: Path, tmp_path: Path, flambeau: Any, kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    canary = tmp_path / "canary"
    (tmp_path / "evil_module.py").write_text(f"open({str(canary)!r}, 'w').close()\nf = list\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = members(export / "model.pt2")
    KINDS[kind](found, canary)
    folder = foreign(export, tmp_path / "foreign", packed(found))
    photos = exported_run.parent / "photos"
    for command in (
        ("verify", folder), ("predict", folder, photos / "waves" / "1.png"),
        ("evaluate", folder, photos, "--json"),
    ):  # fmt: skip
        answer = flambeau(*command)
        assert not canary.exists(), command
        assert answer.code == (1 if command[0] == "verify" else 2), answer
        assert "whole:" not in answer.out
    assert verify_export(folder).wrong
    with pytest.raises(InputError):
        load_export(folder)
    assert not canary.exists()


def test_a_trusted_file_is_run_and_named(
    export: Path, exported_run: Path, tmp_path: Path, flambeau: Any
) -> None:
    """With --trust it is as dangerous as it was: that is what the flag says."""
    canary = tmp_path / "canary"
    found = members(export / "model.pt2")
    KINDS["sample inputs"](found, canary)
    folder = foreign(export, tmp_path / "foreign", packed(found))
    image = exported_run.parent / "photos" / "waves" / "1.png"
    answer = flambeau("predict", folder, image)
    assert answer.code == 2
    assert "would run" in answer.err and "eval" in answer.err
    assert answer.err.rstrip().endswith(f"flambeau predict {folder} {image} --trust")
    answer = flambeau("predict", folder, image, "--trust")
    assert f"running {folder / 'model.pt2'}" in answer.err
    assert canary.exists()


def test_a_graph_that_is_not_plain_is_loaded_by_who_made_it(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one with an operator of the user's own."""

    def refuses(archive: object) -> Any:
        raise NotPlain("it has an operator of one's own")

    monkeypatch.setattr("flambeau.exports.formats.torch_export_file.plain_graph", refuses)
    said: list[str] = []
    load_export(export, say=said.append)
    assert said == [f"running {export / 'model.pt2'}, which {export} names (your own)"]
    data = (export / "model.pt2").read_bytes()
    folder = foreign(export, tmp_path / "foreign", data)  # its export.json is written otherwise
    with pytest.raises(UntrustedCode, match="an operator of one's own"):
        load_export(folder)
    shutil.copytree(export, tmp_path / "changed")
    (tmp_path / "changed" / "model.pt2").write_bytes(data + b"\0")
    with pytest.raises(InputError):
        load_export(tmp_path / "changed")


def test_an_operator_that_opens_files_is_refused(export: Path, tmp_path: Path) -> None:
    """`aten.from_file` makes the file that it names, and `aten.save` writes one."""
    file = tmp_path / "made"
    for name, arguments in (
        ("from_file.default", [{"as_string": str(file)}, {"as_bool": True}, {"as_int": 8}]),
        ("save.default", [{"as_int": 1}, {"as_string": str(file)}]),
        ("set_.source_Storage", [{"as_tensor": {"name": "pixels"}}, {"as_int": 1}]),
        (
            "_reshape_alias.default",
            [{"as_tensor": {"name": "pixels"}}, {"as_ints": [9]}, {"as_ints": [9]}],
        ),
    ):
        found = members(export / "model.pt2")
        in_model(target(f"torch.ops.aten.{name}", *arguments))(found, file)
        with pytest.raises(NotPlain, match=r"it calls|has no operator"):
            read_plain(packed(found))
        assert not file.exists()


def test_the_archive_is_what_it_says(export: Path) -> None:
    found = members(export / "model.pt2")
    whole = packed(found)
    read_plain(whole)
    double = io.BytesIO(whole)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(double, "a") as archive:
        archive.writestr(f"archive/{MODEL}", b"{}")
    weights = json.loads(found[WEIGHTS])
    meta = next(iter(weights["config"].values()))["tensor_meta"]
    meta["storage_offset"] = {"as_int": 1 << 40}
    far = packed({**found, WEIGHTS: json.dumps(weights).encode()})
    for data in (
        double.getvalue(), far, packed(found, compress=zipfile.ZIP_DEFLATED),
        packed({**found, "../up": b""}), packed({**found, "byteorder": b"big"}), packed({}), b"", b"PK",
        packed({**found, MODEL: b"[" * 100_000}), packed({**found, MODEL: b'{"a": 1, "a": 2}'}),
        packed({name: content for name, content in found.items() if name != WEIGHTS}),
    ):  # fmt: skip
        with pytest.raises(NotPlain):
            read_plain(data)


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_file_raises_nothing_else(export: Path, seed: int) -> None:
    """Bytes, and values of the JSON, at random: what comes out is a graph, or one kind of error."""
    draw = random.Random(seed)
    original = (export / "model.pt2").read_bytes()
    found = members(export / "model.pt2")
    pixels, full_size = torch.zeros(1, 32, 32, 3, dtype=torch.uint8), torch.tensor([32, 32])
    for turn in range(25):
        if turn % 2:
            data = bytearray(original)
            for _ in range(draw.randint(1, 20)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            del data[draw.randrange(len(data)) :: draw.choice([1, 10**9])]
            changed = bytes(data)
        else:
            told = json.loads(found[MODEL])
            for _ in range(draw.randint(1, 3)):
                mutate(told, draw)
            changed = packed({**found, MODEL: json.dumps(told).encode()})
        try:
            graph = read_plain(changed)
        except NotPlain:
            continue
        try:
            graph(pixels, full_size)
        except (InputError, RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            continue  # of torch's own operators; `load_export` makes one error of them


def mutate(told: Any, draw: random.Random) -> None:
    """Replace one value somewhere in it."""
    while True:
        keys = list(told) if isinstance(told, dict) else list(range(len(told)))
        key = draw.choice(keys)
        below = told[key]
        if isinstance(below, dict | list) and below and draw.random() < 0.9:
            told = below
            continue
        told[key] = draw.choice([None, -1, 10**30, "x", [], {}, 1.5, True, {"as_int": "y"}, below])
        return


class Parts(nn.Module):
    """Operators of several results, lists, numbers, branches and modes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 4)
        self.register_buffer("not_kept", torch.arange(4.0), persistent=False)

    def forward(
        self, pixels: torch.Tensor, size: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = pixels.permute(0, 3, 1, 2).float() / 255
        with torch.no_grad():
            x = torch.nn.functional.relu_(self.norm(self.first(x)))
        left, right = x.chunk(2, 1)
        values, _ = torch.cat([right, left], 1).flatten(2).topk(5, -1)
        tokens = values.transpose(1, 2)
        mixed = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        y = mixed.mean(1) * x.shape[2] ** 0.5 + size.sum()
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.last(y)
        logits = logits.float() + self.not_kept + torch.tensor([1.0, -torch.inf, 0.0, 2.0])
        return logits, logits.softmax(1)


SIZES = {
    "Mul(Integer(2), Symbol('s0', positive=True, integer=True))": True,
    "Max(Integer(1), TruncToInt(Mul(Float('1.7', precision=53), ToFloat(Symbol('s1')))))": True,
    "GreaterThan(Symbol('u0', integer=True), Integer(-1))": True,
    "Symbol('__import__')": True,  # a name
    "S('1')": False, "Max('1', 2)": False, "Symbol(S('1'))": False, "Float('e')": False,
    "Float(x='1')": False,
    "().__class__": False, "eval('1')": False, "Symbol('a b')": False, "Integer(lambda: 1)": False,
    "[Symbol('s') for s in 'ab']": False, "Symbol": True, "Max.mro()": False, "(Mul)('x')": False, "": False,
}  # fmt: skip
GUARDS = {
    "(L['x'].size()[1] // 2) <= L['x'].size()[1]": True,
    "(L['a'][0].size()[1]*3) != torch.sym_max(1, L['x'].size()[1] // 2)": True,
    "L.__class__": False, "torch.hub.load('x')": False, "eval('1')": False, "(lambda: 1)()": False,
    "L['x'].tofile('x')": False, "x": False, "[1 for L in 'a']": False, "f'{L}'": False,
}  # fmt: skip


def test_sizes_and_guards_are_arithmetic() -> None:
    for text, is_plain in SIZES.items():
        for where in ({"a": [{"expr_str": text}]},):
            assert accepts(where) is is_plain, text
    for text, is_plain in GUARDS.items():
        assert accepts({"guards_code": [text]}) is is_plain, text


def accepts(program: dict[str, Any]) -> bool:
    try:
        check_words(program)
    except NotPlain:
        return False
    return True


def test_graph_gives_the_bits_of_torchs_own_reader(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Parts().eval()
    pixels, size = torch.randint(0, 256, (2, 9, 11, 3), dtype=torch.uint8), torch.tensor([9, 11])
    sides = {1: torch.export.Dim("h", min=4, max=99), 2: torch.export.Dim("w", min=4, max=99)}
    shapes = {"pixels": {0: torch.export.Dim("n", max=99), **sides}, "size": None}
    program = torch.export.export(model, (pixels, size), dynamic_shapes=shapes, strict=False)
    file = io.BytesIO()
    torch.export.save(program, file)
    archive = read_archive(file.getvalue())
    check_words(archive.program)
    graph = plain_graph(archive)
    file.seek(0)
    theirs = torch.export.load(file).module()
    with torch.inference_mode():
        for shape in [(2, 9, 11, 3), (5, 30, 7, 3)]:
            pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
            for _ in range(2):  # nothing of the first call stays
                for got, expected in zip(graph(pixels, size), theirs(pixels, size), strict=True):
                    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        {"image_size": 60_000},
        {"image_size": "9"},
        {"dataset": {"channels": 300_000}},
        {"dataset": {"mean": "grey"}},
        {"dataset": {"std": [0.0, 0.0, 0.0]}},
        {"dataset": {"classes": "ab"}},
    ],
)
def test_what_an_index_claims_is_checked_before_memory_is_taken(
    change: dict[str, Any], export: Path, tmp_path: Path
) -> None:
    folder = foreign(export, tmp_path / "foreign", (export / "model.pt2").read_bytes())
    told = json.loads((folder / "export.json").read_text())
    told |= change if "image_size" in change else {"dataset": told["dataset"] | change["dataset"]}
    (folder / "export.json").write_text(json.dumps(told))
    with pytest.raises(InputError, match=r"export\.json (was edited|is of another version)"):
        load_export(folder)


def test_integers_of_a_graph_do_not_grow_without_bound(export: Path, tmp_path: Path) -> None:
    """Each product would have twice the bits of the one before."""
    found = members(export / "model.pt2")
    told = json.loads(found[MODEL])
    value: dict[str, Any] = {"as_int": 2**62}
    nodes = []
    for number in range(40):
        inputs = [{"name": name, "arg": value, "kind": 1} for name in "ab"]
        value = {"as_sym_int": {"as_name": f"grown{number}"}}
        nodes.append(
            {"target": "_operator.mul", "inputs": inputs, "outputs": [value], "metadata": {}}
        )
    graph = graph_of(told)
    graph["nodes"] = nodes + graph["nodes"]
    found[MODEL] = json.dumps(told).encode()
    folder = foreign(export, tmp_path / "foreign", packed(found))
    with pytest.raises(InputError, match="does not fit") as refused:
        load_export(folder)
    assert str(refused.value.__cause__) == "an integer of 125 bits"


def made_by(target: str, *inputs: dict[str, Any]) -> dict[str, Any]:
    """A node of a graph."""
    made = {"as_tensor": {"name": "made"}}
    arguments = [{"name": "", "arg": one, "kind": 1} for one in inputs]
    return {"target": target, "inputs": arguments, "outputs": [made], "metadata": {}}


@pytest.mark.parametrize(
    "node",
    [
        made_by("torch.ops.aten.full.default", {"as_ints": [2**31]}, {"as_float": 1.0}),
        made_by("torch.ops.aten.arange.default", {"as_int": 2**40}),
        made_by(
            "torch.ops.aten.repeat.default",
            {"as_tensor": {"name": "SIZE"}},
            {"as_ints": [2**30, 1]},
        ),
        made_by("torch.ops.aten.repeat_interleave.Tensor", {"as_tensor": {"name": "SIZE"}}),
    ],
    ids=["full", "arange", "repeat", "repeat_interleave"],
)
def test_a_graph_that_would_fill_the_memory_is_refused(
    node: dict[str, Any], export: Path, tmp_path: Path
) -> None:
    found = members(export / "model.pt2")
    told = json.loads(found[MODEL])
    graph = graph_of(told)
    size = next(one["as_tensor"]["name"] for one in graph["inputs"][::-1])
    text = json.dumps(node).replace("SIZE", size)
    graph["nodes"] = [json.loads(text), *graph["nodes"]]
    found[MODEL] = json.dumps(told).encode()
    folder = foreign(export, tmp_path / "foreign", packed(found))
    with pytest.raises(
        InputError, match=r"GiB in one step, by aten|whose size is not known before"
    ):
        load_export(folder)


def test_a_model_that_is_larger_than_its_weights_is_not_built(
    exported_run: Path, tmp_path: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a folder from elsewhere may name one, beside a small file of weights."""
    run = tmp_path / "run"
    shutil.copytree(exported_run, run)
    config = (run / "config.toml").read_text()
    name = next(line for line in config.splitlines() if line.startswith("model = "))
    (run / "config.toml").write_text(config.replace(name, 'model = "vit_giant_patch14_224"'))
    export = tmp_path / "export"
    assert (
        flambeau("export", exported_run, "--format safetensors --images 6 --out", export).code == 0
    )
    file = export / "model.safetensors"
    with safetensors.safe_open(file, "pt") as opened:
        origin = json.loads(opened.metadata()["flambeau"])
    origin["model"] = "vit_giant_patch14_224"
    state = safetensors.torch.load_file(file)
    safetensors.torch.save_file(state, file, {"flambeau": json.dumps(origin)})

    def takes_memory(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it is built")

    monkeypatch.setattr("flambeau.exports.formats.weights_file.build_model", takes_memory)
    monkeypatch.setattr("flambeau.trainer.prediction.trained_model.make_model", takes_memory)
    for load in (load_export, lambda path: load_trained(path, say=print)):
        with pytest.raises(InputError, match=r"vit_giant_patch14_224 has \d{10} numbers, and its"):
            load(export if load is load_export else run)


def test_weights_that_name_a_file_are_refused(
    exported_run: Path, tmp_path: Path, flambeau: Any
) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "foreign"
    assert (
        flambeau("export", exported_run, "--format safetensors --images 6 --out", folder).code == 0
    )
    (tmp_path / "evil.py").write_text(
        f"open({str(canary)!r}, 'w').close()\n"
        "from flambeau.recipes.models.small_convnet import SmallConvNet\n"
        "def build(channels, num_classes): return SmallConvNet(channels, num_classes, width=32)\n"
    )
    file = folder / "model.safetensors"
    state = safetensors.torch.load_file(file)
    with safetensors.safe_open(file, "pt") as opened:
        origin = json.loads(opened.metadata()["flambeau"])
    named = f"{tmp_path / 'evil.py'}:build"
    origin["model"] = named
    data = safetensors.torch.save(state, {"flambeau": json.dumps(origin)})
    file.write_bytes(data)
    told = json.loads((folder / "export.json").read_text())
    told["files"][file.name] = hashlib.sha256(data).hexdigest()
    told["settings"]["model"] = named
    (folder / "export.json").write_text(json.dumps(told))
    image = exported_run.parent / "photos" / "waves" / "1.png"
    for command in (
        ("verify", folder),
        ("predict", folder, image),
        ("evaluate", folder, image.parents[1]),
    ):
        answer = flambeau(*command)
        assert answer.code == (1 if command[0] == "verify" else 2)
        assert named in answer.out + answer.err
    with pytest.raises(UntrustedCode, match="trust=True"):
        load_export(folder)
    assert not canary.exists()
    answer = flambeau("predict", folder, image, "--trust")
    assert (answer.code, canary.exists()) == (0, True)
    assert f"running {named}, which" in answer.err


def test_a_compiled_library_is_loaded_only_by_who_made_it(
    export: Path, tmp_path: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler: what matters is who is asked before the loader."""
    loaded: list[bytes] = []

    def loader(path: str) -> Any:
        loaded.append(Path(path).read_bytes())
        return lambda pixels, size: [torch.zeros(len(pixels), 3)]

    monkeypatch.setattr(torch._inductor, "aoti_load_package", loader)
    from flambeau.provenance import record

    folder = tmp_path / "compiled"
    shutil.copytree(export, folder)
    (folder / "model.pt2").rename(folder / "model.aoti.pt2")
    told = json.loads((export / "export.json").read_text())
    told |= {"format": "aoti", "file": "model.aoti.pt2"}
    told["files"]["model.aoti.pt2"] = told["files"].pop("model.pt2")
    (folder / "export.json").write_text(json.dumps(told))

    answer = flambeau("verify", folder)
    assert answer.code == 0
    assert "model.aoti.pt2 is a program for this kind of processor: it was not loaded" in answer.out
    with pytest.raises(UntrustedCode, match="a library that was compiled"):
        load_export(folder)
    assert not loaded
    load_export(folder, trust=True)
    assert loaded.pop() == (folder / "model.aoti.pt2").read_bytes()
    assert record((folder / "export.json").read_bytes())  # as `flambeau export` does
    folder.rename(tmp_path / "moved")
    load_export(tmp_path / "moved")
    assert loaded.pop() == (tmp_path / "moved" / "model.aoti.pt2").read_bytes()
    (tmp_path / "moved" / "model.aoti.pt2").write_bytes(b"another library")
    with pytest.raises(UntrustedCode):
        load_export(tmp_path / "moved")
    assert not loaded
