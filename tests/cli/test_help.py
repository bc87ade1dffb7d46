"""Help and its neighbours: at once, without torch, and with the nearest name for a wrong word."""

import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

import flambeau as package
from flambeau.cli.command import VERBS, check, main
from flambeau.cli.flags_from_settings import COMMAND_FLAGS, METAVARS
from flambeau.cli.other_words import FLAG_OF, FOR_TRAIN
from flambeau.run.options.option import GROUPS, plain_text
from flambeau.trainer.settings.settings import FIELDS

HEAVY = ("torch", "numpy", "PIL", "timm", "torchvision", "safetensors", "tqdm", "rich", "shtab")


def test_help_imports_nothing_heavy() -> None:
    """One process for all: what any of these calls imports would still be there at the end."""
    calls = [[], ["--help"], ["--version"], ["recipes", "list"], ["trian"], ["train", "--lrr=1"]]
    calls += [[verb, "--help"] for verb in VERBS]
    script = f"""
import sys
from flambeau.cli.command import main
for call in {calls}:
    try:
        code = main(call)
    except SystemExit as error:
        code = error.code
    print("EXIT", code)
print("HEAVY", [name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    codes = [int(code) for code in re.findall(r"^EXIT (\d)$", done.stdout, re.MULTILINE)]
    assert codes == [0, 0, 0, 0, 2, 2] + [0] * len(VERBS)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_the_command_alone_prints_the_help(flambeau: Any) -> None:
    alone, asked = flambeau(), flambeau("--help")
    assert alone == asked
    assert alone.code == 0
    for verb in VERBS:
        assert re.search(rf"^    {verb}\s+\w", alone.out, re.MULTILINE), verb


@pytest.mark.parametrize("verb", VERBS)
def test_each_help_lists_the_exit_codes(flambeau: Any, verb: str) -> None:
    codes = re.findall(
        r"^  (\d+) +\S", flambeau(verb, "--help").out.partition("exit codes:\n")[2], re.MULTILINE
    )
    assert codes == sorted(codes, key=int)
    assert {"0", "2", "130"} <= {*codes}
    assert ("75" in codes) == (verb in ("train", "sweep", "launch"))


def test_version(flambeau: Any) -> None:
    assert flambeau("--version") == (0, f"flambeau {package.__version__}\n", "")


def test_python_m_flambeau_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flambeau"]
    done = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == f"flambeau {package.__version__}\n"
    wrong = subprocess.run([*command, "trian"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == (
        "flambeau: unknown command 'trian'; did you mean 'train'? (flambeau --help lists all)\n"
    )


def test_every_setting_has_its_flag_and_its_text(
    flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # a line that is broken may be so at a hyphen
    text = " ".join(flambeau("train --help").out.split())
    for name, field in FIELDS.items():
        flag = "DATA" if name == "data" else "--" + name.replace("_", "-")
        assert flag in text
        assert plain_text(field.metadata["text"]) in text
        if field.default not in (None, False, True, 0):
            assert f"(default: {field.default})" in text, name
    assert "%%" not in text


def test_a_value_that_is_no_name_is_not_called_one(flambeau: Any) -> None:
    assert METAVARS.keys() <= FIELDS.keys()
    shown = flambeau("train --help").out
    for flag in ("--verify-steps 1/N", "--extend LENGTH", "--cache-size SIZE", "--model NAME"):
        assert f"  {flag} " in shown


def test_what_matters_comes_first(flambeau: Any) -> None:
    text = flambeau("train --help").out
    head, _, rest = text.partition("what matters first:\n")
    first, *others = re.split(r"^(?=\S.*:$)", rest, flags=re.MULTILINE)
    shown = re.findall(r"^  (DATA|--[a-z-]+)", first, re.MULTILINE)
    assert shown == [
        "DATA", "--out", "--model", "--epochs", "--batch-size", "--lr", "--image-size", "--pretrained",
        "--optimizer", "--schedule", "--augment", "--seed",
    ]  # fmt: skip
    assert "--lr" not in head
    flags = re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
    assert len(flags) == len(set(flags))
    headings = [other.splitlines()[0] for other in others]
    assert headings == [
        "data:", "model:", "fine-tuning:", "length:", "optimization:", "machine:", "processes:",
        "run folder:", "exit codes:",
    ]  # fmt: skip


@pytest.mark.parametrize("words", ["train --help --zh", "train --zh --help", "train --zh"])
def test_the_help_of_train_in_chinese(flambeau: Any, words: str) -> None:
    code, out, err = flambeau(words)
    assert (code, err) == (0, "")
    flags = re.compile(r"^  (?:-h, )?(--[a-z-]+|DATA)", re.MULTILINE)
    assert flags.findall(out) == flags.findall(flambeau("train --help").out)
    plain = re.sub(r"\s", "", out)
    for name, field in FIELDS.items():
        for text in (plain_text(field.metadata["chinese"]), field.metadata["auto"][1]):
            assert re.sub(r"\s", "", text) in plain, name
    for text in [*(row[3] for row in COMMAND_FLAGS.values()), *GROUPS.values()]:
        assert re.sub(r"\s", "", text) in plain
    assert not re.findall(r"\b(the|will|of|and)\b", out)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_chinese_lines_fit_the_terminal(
    flambeau: Any, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", f"{columns}")
    for line in flambeau("train --zh").out.splitlines()[1:]:
        width = sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in line)
        assert width <= columns + 1 or "{" in line or " " not in line.strip(), line
        assert line.lstrip()[:1] not in "，。；：）" or not line


def test_chinese_needs_an_encoding_that_has_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flambeau", "train", "--zh"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "flambeau: standard output is in ascii, which has no Chinese letters: set PYTHONUTF8=1, or leave "
        "--zh out\n"
    )


def test_zh_is_a_flag_of_train_alone(flambeau: Any) -> None:
    assert flambeau("evaluate --zh").code == 2
    assert "measure the model" in flambeau("evaluate --help").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("evaluat", "unknown command 'evaluat'; did you mean 'evaluate'?"),
        ("qqqq", "unknown command 'qqqq' (flambeau --help lists all)"),
        ("--halp", "unknown flag --halp; did you mean '--help'?"),
        ("--halp train", "unknown flag --halp; did you mean '--help'?"),
        ("train --epoch 3", "unknown flag --epoch; did you mean '--epochs'?"),
        ("train --btach-size=3", "unknown flag --btach-size; did you mean '--batch-size'?"),
        ("train --learning-rate 0.1", "unknown flag --learning-rate; did you mean '--lr'?"),
        ("train --device gpu", "'gpu' is not available here: there is cpu; did you mean 'cuda'?"),
        ("train --device gpu:1", "did you mean 'cuda:1'?"),
        ("train --device cup", "did you mean 'cpu'?"),
        ("train --no-flop", "unknown flag --no-flop; did you mean '--no-flip'?"),
        (
            "train --extend -1ep",
            "extend must be a duration such as '10ep' (epochs) or '10st' (steps), got '-1ep'",
        ),
        ("train --warmup -5%", "warmup must be a duration such as '5%' (% of the run)"),
        (
            "train --stop-within -5s",
            "stop_within must be a time such as '30s', '5min' or '8h', got '-5s'",
        ),
        ("train --optimizer adam --betas -0.9,0.9", "betas must be"),
        ("train --lr -1", "lr must be above 0, got -1"),
        ("train --lr -x", "flambeau: --lr: must be a number, got '-x'"),
        ("train --seed -1", "seed must be at least 0"),
        ("train --config -x", "--config -x: no such file"),
        ("train --lr", "--lr needs a value; flambeau train --help says which"),
        ("train --lr --epochs 3", "--lr needs a value"),
        ("train --lr -h 3", "--lr needs a value"),
        ("train --fresh=1", "--fresh takes no value, got '1'"),
        ("launch --procs", "--procs needs a value; flambeau launch --help says which"),
        ("runs --sort -x", "--sort -x: unknown column"),
        ("train --data photos", "unknown flag --data: the data are named without a flag"),
        ("train photos --resume", "unknown flag --resume: the same command continues"),
        ("train photos --val-split=0.2", "--val-split: a tenth of each class is held out"),
        ("train --threads 2", "unknown flag --threads: the environment variable OMP_NUM_THREADS"),
        ("train --dataset photos", "unknown flag --dataset: the data are named without a flag"),
        ("train --num_classes=3", "unknown flag --num_classes: the classes are those of the data"),
        ("train --no-cuda", "unknown flag --no-cuda; did you mean '--device cpu'?"),
        ("train --ema-decay 0.9", "did you mean '--ema'?"),
        ("train --Max_Grad_Norm 1", "did you mean '--clip-norm'?"),
        ("train --random-seed 1", "did you mean '--seed'?"),
        ("train --log-dir x", "did you mean '--out'?"),
        ("train --min-lr 0", "--schedule chooses where the learning rate ends"),
        ("train --eval", "it evaluates after each epoch"),
        ("train --criterion bce", "--loss chooses it"),
        ("check photos --resume", "unknown flag --resume (flambeau check --help lists all)"),
        ("train --qqq", "unknown flag --qqq (flambeau train --help lists all)"),
        ("train a b", "unexpected argument 'b'; see flambeau train --help"),
        ("predict run x.png --jsn", "unknown flag --jsn; did you mean '--json'?"),
        ("predict run", "WHAT"),
        ("evaluate run data --worker 2", "did you mean '--workers'?"),
        ("verify", "RUN|FILE is missing; see flambeau verify --help"),
        ("verify a b", "unexpected argument 'b'; see flambeau verify --help"),
        ("recipes shw ema", "'shw'"),
        ("env --jason", "did you mean '--json'?"),
        ("train --lr", "--lr"),
        ("train --lr fast", "--lr"),
        ("train --epochs 1.5", "--epochs"),
        ("train --fresh=yes", "--fresh"),
        ("predict run x.png --top many", "--top"),
    ],
)
def test_a_wrong_word_is_named(words: str, message: str, flambeau: Any) -> None:
    code, out, err = flambeau(words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("flambeau: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "evaluate a b",
            "b is the folder of a run, and no data: several runs answer together by --with b",
        ),
        ("predict a b photo.png", "b is the folder of a run, and no data"),
        ("evaluate a b photos", "unexpected argument 'photos' (several runs are given by --with)"),
    ],
)
def test_a_run_is_no_data(
    words: str, message: str, flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
        (tmp_path / name / "metrics.jsonl").touch()
    answer = flambeau(*words.split())
    assert answer.code == 2
    assert message in answer.err


@pytest.mark.parametrize(
    ("words", "teacher", "data"),
    [
        ("photos/ --teacher runs/a runs/b --epochs 1", "runs/a,runs/b", "photos/"),
        ("--teacher runs/a runs/b photos/", "runs/a,runs/b", "photos/"),
        ("--teacher runs/a photos/ --epochs 1", "runs/a", "photos/"),
        ("--epochs 1 --teacher runs/a s3://bucket/runs/b", "runs/a,s3://bucket/runs/b", None),
        ("photos/ --teacher runs/a,runs/b", "runs/a,runs/b", "photos/"),
    ],
)
def test_several_teachers(
    words: str, teacher: str, data: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        for file in ("config.toml", "metrics.jsonl"):
            (tmp_path / "runs" / name / file).touch()
    found = check(["train", *words.split()])
    assert (found.teacher, getattr(found, "data", None)) == (teacher, data)


def test_a_share_in_percent() -> None:
    assert check(["train", "--subset", "30%"]).subset == 0.3
    assert check(["train", "--label-smoothing", "2.5%"]).label_smoothing == 0.025
    with pytest.raises(package.InputError, match="--lr: must be a number, got '10%'"):
        check(["train", "--lr", "10%"])
    with pytest.raises(package.InputError, match=r"flambeau sweep --set lr=0.1,0.2 tries several"):
        check(["train", "--lr", "0.1,0.2"])


def test_main_reads_the_arguments_of_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flambeau", "nope"])
    assert main() == 2
    assert "'nope'" in capsys.readouterr().err


def test_words_of_other_programs_lead_to_flags_that_there_are(flambeau: Any) -> None:
    known = flambeau("train --help")[1]
    for word, flag in FLAG_OF.items():
        assert re.search(rf"{flag.partition(' ')[0]}[ ,]", known), word
    assert not FLAG_OF.keys() & FOR_TRAIN.keys()
    for word in [*FLAG_OF, *FOR_TRAIN]:
        assert f" {word} " not in known, word
        code, _, err = flambeau(f"train {word}")
        assert code == 2
        assert (FLAG_OF | FOR_TRAIN)[word] in err
