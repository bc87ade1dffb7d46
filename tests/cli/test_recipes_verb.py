"""`flambeau recipes`: its words, its files and its refusals."""

import argparse
import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from flambeau.cli import recipe_search, recipes
from flambeau.cli.command import main
from flambeau.errors import InputError

FOLDER = Path(recipes.__file__).parents[1] / "recipes"
SAMPLE_ORDER = FOLDER / "data" / "sample_order.py"
AFTER = """  from sample_order import sample_order, sample_seeds, alternating_seeds, mix
  page: flambeau recipes page sample_order
"""


def call(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    recipes.add_arguments(parser)
    return recipes.run(parser.parse_args([str(word) for word in words]))


@pytest.mark.parametrize("words", [(), ("list",)])
def test_list_names_every_recipe_below_its_folder(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*words) == 0
    expected = {}
    for path in FOLDER.rglob("*.py"):
        if path.stem != "__init__":
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            expected[f"{path.parent.name}/{path.stem}"] = docstring.splitlines()[0]
    assert read_listing(capsys.readouterr().out) == expected


def read_listing(text: str) -> dict[str, str]:
    found, folder = {}, ""
    for line in text.splitlines():
        if line.startswith("  "):
            name, summary = line.split(maxsplit=1)
            found[f"{folder}/{name}"] = summary
        else:
            folder = line
    return found


@pytest.mark.parametrize("words", [("--zh",), ("list", "--zh"), ("--zh", "list")])
def test_list_in_chinese(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == 0
    listing = read_listing(capsys.readouterr().out)
    assert listing["data/sample_order"].startswith("样本顺序与逐样本种子")
    assert all(re.search(r"[\u4e00-\u9fff]", summary) for summary in listing.values())


@pytest.mark.parametrize("name", ["sample_order", "data/sample_order"])
def test_show_prints_the_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", name) == 0
    assert capsys.readouterr().out == SAMPLE_ORDER.read_text(encoding="utf-8")


@pytest.mark.parametrize("action", [("show",), ("copy", ".")])
def test_unknown_name_is_refused_with_the_nearest(action: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"'sample_ordr'; did you mean sample_order or data/"):
        call(action[0], "sample_ordr", *action[1:])
    with pytest.raises(InputError, match=r"'qqqqqq'\.\n`flambeau recipes` lists them"):
        call(action[0], "qqqqqq", *action[1:])


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("training/clipping", "training_tricks.md#gradient-clipping"),
        ("accumulation", "training_tricks.md#gradient-accumulation"),
        ("bilinear_pooling", "training_tricks.md#bilinear-pooling"),
        ("weight_penalty", "training_tricks.md#l1-l2-and-weight-decay"),
        ("check_shapes", "tensors.md#shapes"),
        ("pairwise_distances", "tensors.md#products-and-distances"),
        ("straight_through", "autograd.md#straight-through-gradients"),
        ("gather_rows", "parallel/collectives.md#rows-of-different-lengths"),
        ("first_rank", "parallel/collectives.md#one-rank-for-all"),
        ("uneven_inputs", "parallel/samplers.md"),
        ("worker_count", "data_cookbook.md#workers-pinning-prefetch"),
        ("torchscript_file", "inference.md#torchscript-files"),
    ],
)
@pytest.mark.parametrize("action", ["show", "page", "copy"])
def test_a_technique_that_is_no_recipe_leads_to_its_page(
    action: str, name: str, page: str, read_once: None
) -> None:
    with pytest.raises(InputError, match=rf"On a page: flambeau recipes page {re.escape(page)}$"):
        call(action, name, *["."] * (action == "copy"))


@pytest.mark.parametrize("name", ["../cli/recipes", "__init__", "data", ""])
def test_only_recipes_have_names(name: str) -> None:
    with pytest.raises(InputError, match="no recipe is named"):
        call("show", name)


def test_copy_into_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("copy", "sample_order", tmp_path) == 0
    copy = tmp_path / "sample_order.py"
    assert copy.read_bytes() == SAMPLE_ORDER.read_bytes()
    assert capsys.readouterr().out == f"wrote {copy}\n{AFTER}"


def test_copy_under_another_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("copy", "data/sample_order", tmp_path / "order.py") == 0
    assert (tmp_path / "order.py").read_bytes() == SAMPLE_ORDER.read_bytes()
    after = AFTER.replace("from sample_order", "from order")
    assert capsys.readouterr().out == f"wrote {tmp_path / 'order.py'}\n{after}"


def test_copy_never_overwrites(tmp_path: Path) -> None:
    mine = tmp_path / "sample_order.py"
    mine.write_text("mine", encoding="utf-8")
    for dest in (tmp_path, mine):
        with pytest.raises(InputError, match=re.escape(f"{mine} exists, and nothing was written")):
            call("copy", "sample_order", dest)
    assert mine.read_text(encoding="utf-8") == "mine"


def test_copy_does_not_write_through_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "sample_order.py").symlink_to(tmp_path / "target.py")
    with pytest.raises(InputError, match="nothing was written"):
        call("copy", "sample_order", tmp_path)
    assert not (tmp_path / "target.py").exists()


def test_copy_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a folder nor the name of a"):
        call("copy", "sample_order", tmp_path / "missing")
    with pytest.raises(InputError, match=r"cannot write .*No such file or directory"):
        call("copy", "sample_order", tmp_path / "missing" / "order.py")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["recipes"], ["recipes", "show", "sample_order"]])
def test_a_reader_that_leaves(words: list[str]) -> None:
    """`flambeau recipes | head -1`: no traceback, no complaint."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as pipe:
        command = [sys.executable, "-W", "error", "-m", "flambeau", *words]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_listing_and_showing_need_no_torch() -> None:
    script = """
import sys
from flambeau.cli.command import main
assert main(["recipes"]) == main(["recipes", "show", "sample_order"]) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "sample_ordr"], "did you mean sample_order"),
        (["show"], "NAME"),
        (["lst"], "lst"),
        (["list", "--colour"], "--colour"),
    ],
)
def test_mistakes_end_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert len(said.err.splitlines()) <= 2


# ---------------------------------------------------------------- searching


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages are read for the first of the questions only; answering them changes nothing."""
    monkeypatch.setattr(recipes, "Index", index_of)


@functools.cache
def index_of(*, chinese: bool) -> recipe_search.Index:
    return recipe_search.Index(chinese=chinese)


def found(words: str, capsys: pytest.CaptureFixture[str], *more: str) -> list[tuple[str, str]]:
    assert main(["recipes", "find", *words.split(), "--json", *more]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["line"] for row in rows)
    return [(row["kind"], row["name"]) for row in rows]


ERRORS, OLD = (
    ("page", f"errors_and_old_names.md#{mark}") for mark in ("error-messages", "old-names")
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ema", ("recipe", "training/ema")),
        ("moving average of weights", ("recipe", "training/ema")),
        ("freezing layers", ("recipe", "models/freezing")),
        ("accumulate gradients", ("page", "training_tricks.md#gradient-accumulation")),
        ("SyncBatchNorm", ("recipe", "parallel/sync_batchnorm")),
        ("pin_memory", ("recipe", "data/device_prefetch")),
        ("torch.cuda.amp", ("recipe", "training/amp_step")),
        ("torch.cuda.amp", OLD),
        ("apex", ("page", "parallel/from_apex_and_old_launchers.md")),
        ("apex amp", OLD),
        ("volatile", OLD),
        ("variable", OLD),
        ("DataParallel", ("page", "parallel/data_parallel.md")),
        ("CUDA out of memory", ("recipe", "memory/memory_budget")),
        ("CUDA out of memory", ERRORS),
        ("RuntimeError: Trying to backward through the graph a second time", ERRORS),
        ("size mismatch for fc.weight", ERRORS),
        ("Unexpected key(s) in state_dict", ERRORS),
        ("label smoothing", ("flag", "flambeau train --label-smoothing")),
        ("指数移动平均", ("recipe", "training/ema")),
        ("冻结", ("recipe", "models/freezing")),
        ("梯度累积", ("page", "training_tricks.md#梯度累积")),
        ("标签平滑", ("recipe", "training/label_smoothing")),
        ("显存不足", ("page", "errors_and_old_names.md#错误信息")),
        ("显存不足", ("recipe", "memory/activation_checkpointing")),
        ("混合精度", ("recipe", "training/amp_step")),
    ],
)
def test_questions_find_their_answers(
    words: str, expected: tuple[str, str], read_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in found(words, capsys)[:5]


@pytest.mark.parametrize(("words", "chinese"), [("显卡", True), ("GPU", False)])
def test_one_word_for_a_device_finds_the_page_of_devices_first(
    words: str, *, chinese: bool
) -> None:
    first = index_of(chinese=chinese).search(words)[0]
    assert first.name.startswith("devices.md"), first.name


def test_the_name_of_a_recipe_finds_it() -> None:
    index = index_of(chinese=False)
    for path in FOLDER.rglob("[!_]*.py"):
        for words in (path.stem, path.stem.replace("_", " ")):
            names = [entry.name for entry in index.search(words)]
            assert f"{path.parent.name}/{path.stem}" in names[:3], words


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_page_that_is_found_can_be_printed(
    language: str, read_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--zh"] if language == "zh" else []
    pages = {
        name for kind, name in found("torch", capsys, "--top", "9999", *words) if kind == "page"
    }
    assert len(pages) > 30
    for name in pages:
        assert call(*words, "page", name) == 0, name
        assert capsys.readouterr().out.startswith("#")


def test_find_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "find", "mixup", "--top", "2"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].split() == ["what", "name", "line"]
    assert re.match(r"recipe +training/mixup +Mixup: ", lines[1])
    assert len(lines) == 3
    assert "flambeau recipes page NAME" in said.err


def test_a_misspelt_word_counts_as_the_nearest(
    read_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert found("label smothing", capsys)[0] == ("recipe", "training/label_smoothing")
    assert ("recipe", "training/mixup") in found("mixpu", capsys)[:2]
    assert found("loss is nna", capsys)[:3] == found("loss is nan", capsys)[:3]


@pytest.mark.parametrize(("alone", "more"), [("mixup", "qqqqzz"), ("梯度累积", "犇骉")])
def test_a_word_that_no_page_has_costs_nothing(
    alone: str, more: str, read_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert found(f"{alone} {more}", capsys)[:3] == found(alone, capsys)[:3]


@pytest.mark.parametrize(
    ("words", "same"), [("imbalanced classes", "uneven classes"), ("爆显存", "显存不足")]
)
def test_synonyms_find_the_same(
    words: str, same: str, read_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    first = found(words, capsys)[:5]
    assert {*first} & {*found(same, capsys)[:3]}


@pytest.mark.parametrize("word", ["does", "this", "where", "using", "which", "through"])
def test_a_word_of_every_question_counts_as_nothing(word: str) -> None:
    index = index_of(chinese=False)
    alone = [entry.name for entry in index.search("overflow mixup", top=5)]
    assert [entry.name for entry in index.search(f"{word} overflow mixup", top=5)] == alone


def test_a_synonym_stands_in_one_line() -> None:
    texts = Counter(text for text, _ in recipe_search._synonyms())
    assert [text for text, times in texts.items() if times > 1] == []


def test_an_english_synonym_is_found_beside_chinese_characters() -> None:
    def alternatives(query: str) -> list[set[tuple[str, ...]]]:
        return [set(concept.alternatives) for concept in recipe_search._synonyms_in(query)[0]]

    assert alternatives("怎么加label smoothing呢") == alternatives("怎么加 label smoothing 呢")
    assert len(alternatives("怎么加label smoothing呢")) == 1
    assert alternatives("relabel smoothings") == []


@pytest.mark.parametrize("chinese", [False, True])
def test_questions_are_of_entries_that_are_there(chinese: bool) -> None:
    names = {entry.name for entry in index_of(chinese=chinese).entries}
    lines = [*recipe_search.asked(chinese=chinese)]
    assert len(lines) > 300
    assert {name for name, _ in lines} <= names
    assert len({name for name, _ in lines}) == len(lines)
    assert all(questions.strip() for _, questions in lines)


def test_a_section_is_found_by_what_people_ask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    question = "my loop eats all the ram"
    asked = tmp_path / "asked_en.tsv"
    asked.write_text(
        f"memory.md#del-loss\twhy | {question}\nno_page.md\tnothing\n", encoding="utf-8"
    )
    monkeypatch.setitem(recipe_search.ASKED, "en", asked)
    first = recipe_search.Index(chinese=False).search(question, top=1)
    assert [entry.name for entry in first] == ["memory.md#del-loss"]


def test_one_question_like_the_query_counts_more_than_its_words_in_several(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = tmp_path / "asked_en.tsv"
    asked.write_text(
        "memory.md\tzebra giraffe okapi\nhooks.md\tzebra a b c d | giraffe e f g h | okapi i j k l\n",
        encoding="utf-8",
    )
    monkeypatch.setitem(recipe_search.ASKED, "en", asked)
    found = recipe_search.Index(chinese=False).search("zebra giraffe okapi", top=2)
    assert [entry.name for entry in found] == ["memory.md", "hooks.md"]


def test_nothing_found_ends_with_1(read_once: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "find", "qzqzq"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "flambeau: nothing found for 'qzqzq'\n")
    for odd in ("?", "不存在的东西", "the", "x" * 10_000):
        assert main(["recipes", "find", odd]) in (0, 1)


def test_finding_needs_no_torch() -> None:
    script = """
import sys
from flambeau.cli.command import main
assert main(["recipes", "find", "ema"]) == main(["recipes", "page", "ema"]) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=True)


# ---------------------------------------------------------------- pages, and several copies


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("ema", "en/recipes/ema.md"),
        ("training/ema", "en/recipes/ema.md"),
        ("recipes/ema.md", "en/recipes/ema.md"),
        ("memory", "en/memory.md"),
        ("parallel/fsdp", "en/parallel/fsdp.md"),
        ("schedules", "en/recipes/schedules.md"),
        ("schedules.md", "en/schedules.md"),
        ("ema --zh", "zh/recipes/ema.md"),
    ],
)
def test_page_prints_the_file(name: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "page", *name.split()]) == 0
    text = (FOLDER.parents[2] / "docs" / file).read_text(encoding="utf-8")
    text = re.sub("```bash not-run: .*\n", "```bash\n", text)  # the reason is for no reader
    assert "not-run" not in text
    assert capsys.readouterr().out == text


def test_page_prints_the_part_below_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "page", "memory.md#del-loss"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("## del loss\n")
    assert sum(line.startswith("## ") for line in out.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["page", "emma"], "no recipe and no page is named 'emma'; did you mean 'ema'?"),
        (["page", "memory#nothing"], "memory has no heading #nothing"),
        (["page", "../../../pyproject.toml"], "no recipe and no page is named"),
        (["find"], "WORD"),
        (["find", "ema", "--top", "0"], "--top must be at least 1, got 0"),
        (["copy", "ema"], "DEST"),
        (["copy", "ema", "mixup", "both.py"], "both.py is no folder, which several recipes need"),
        (["copy", "ema", "mixpu", "."], "no recipe is named 'mixpu'"),
    ],
)
def test_wrong_words_end_with_2(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert list(tmp_path.iterdir()) == []


def test_without_pages_recipes_are_found_all_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (recipes, recipe_search):
        monkeypatch.setattr(module, "docs_folder", lambda: None)
    assert ("recipe", "training/ema") in found("moving average", capsys)
    assert main(["recipes", "page", "ema"]) == 2
    assert "the pages are not installed here" in capsys.readouterr().err


def test_copy_several_and_import_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    assert call("copy", "ema", "training/mixup", "ema", "mine") == 0
    assert capsys.readouterr().out.splitlines() == [
        "wrote mine/ema.py",
        "  from mine.ema import EMA",
        "  page: flambeau recipes page ema",
        "wrote mine/mixup.py",
        "  from mine.mixup import mixup",
        "  page: flambeau recipes page mixup",
    ]
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    exec("from mine.ema import EMA\nfrom mine.mixup import mixup", names)
    copies = [Path(sys.modules.pop(f"mine.{name}").__file__ or "") for name in ("ema", "mixup")]
    del sys.modules["mine"]
    assert copies == [tmp_path / "mine" / "ema.py", tmp_path / "mine" / "mixup.py"]
    assert {"EMA", "mixup"} <= names.keys()


def test_copy_several_all_or_none(tmp_path: Path) -> None:
    (tmp_path / "mixup.py").touch()
    with pytest.raises(InputError, match=r"mixup\.py exists, and nothing was written"):
        call("copy", "ema", "mixup", tmp_path)
    assert not (tmp_path / "ema.py").exists()
