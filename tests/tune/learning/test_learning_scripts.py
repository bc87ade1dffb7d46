"""Scripts with one mistake, and healthy ones beside them, under the watch of `flambeau doctor --learning`."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flambeau.cli.command import main
from flambeau.tune.learning.finding import Finding
from flambeau.tune.learning.run_learning import findings_of
from flambeau.tune.watch import startup
from flambeau.tune.watch.plan import Plan

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(256, 8)
y = (x[:, 0] + x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""
LOOP = """\
for epoch in range(3):
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""


@dataclass(frozen=True)
class Planted:
    """A script, made from the healthy one by one change."""

    kind: str
    old: str
    new: str
    line: str  # a piece of the line that must be named
    rule: str = ""  # of the linter, for the same mistake


PLANTED = [
    Planted(
        "softmax before cross_entropy",
        "model(a)",
        "model(a).softmax(1)",
        "cross_entropy",
        "FLB404",
    ),
    Planted("no zero_grad", "        optimizer.zero_grad()\n", "", "optimizer.step()", "FLB437"),
    Planted(
        "zero_grad before step",
        "optimizer.zero_grad()\n        loss.backward()",
        "loss.backward()\n        optimizer.zero_grad()",
        "optimizer.zero_grad()",
        "FLB434",
    ),
    Planted("loss is maximized", "loss.backward()", "(-loss).backward()", "backward"),
    Planted("no step", "        optimizer.step()\n", "", "backward"),
    Planted("rate is zero", "lr=1e-2", "lr=0.0", "Adam"),
    Planted(
        "not in the optimizer",
        "Adam(model.parameters()",
        "Adam(model[2:].parameters()",
        "Adam",
        "FLB453",
    ),
    Planted(
        "clip before backward",
        "        loss.backward()",
        "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        loss.backward()",
        "clip_grad_norm_",
        "FLB435",
    ),
    Planted(
        "clip after step",
        "        optimizer.step()",
        "        optimizer.step()\n        nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "clip_grad_norm_",
        "FLB450",
    ),
    Planted(
        "softmax before nll_loss",
        "F.cross_entropy(model(a), b)",
        "F.nll_loss(model(a).softmax(1), b)",
        "nll_loss",
        "FLB433",
    ),
    Planted(
        "nll of no logarithms",
        "F.cross_entropy(model(a), b)",
        "F.nll_loss(model(a), b)",
        "nll_loss",
        "FLB457",
    ),
    Planted(
        "kl_div of probabilities",
        "F.cross_entropy(model(a), b)",
        "F.kl_div(model(a).softmax(1), F.one_hot(b, 2).float(), reduction='batchmean')",
        "kl_div",
    ),
    Planted(
        "rate is zero",
        "for epoch in",
        "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch / 100)\n"
        "for epoch in",
        "LambdaLR",
        "FLB448",
    ),
    Planted(
        "nothing loaded",
        "optimizer = torch",
        "weights = {f'module.{key}': value for key, value in model.state_dict().items()}\n"
        "model.load_state_dict(weights, strict=False)\noptimizer = torch",
        "load_state_dict",
    ),
    Planted(
        "inputs not scaled", "x = torch.randn(256, 8)", "x = torch.rand(256, 8) * 255", "model(a)"
    ),
    Planted(
        "same random numbers",
        "        loss = F",
        "        torch.manual_seed(1)\n        loss = F",
        "manual_seed(1)",
    ),
    Planted(
        "sigmoid before logits",
        "F.cross_entropy(model(a), b)",
        "F.binary_cross_entropy_with_logits(model(a).sigmoid()[:, 0], b.float())",
        "binary_cross_entropy_with_logits",
        "FLB431",
    ),
    Planted(
        "shapes broadcast",
        "F.cross_entropy(model(a), b)",
        "((model(a)[:, :1] - b.float()) ** 2).mean()",
        "mean()",
    ),
    Planted(
        "eval mode",
        "    for a, b",
        "    if epoch: model.eval()\n    for a, b",
        "model(a)",
        "FLB436",
    ),
    Planted("equal samples", "model(a)", "model(a[:1].expand(len(a), -1))", "cross_entropy"),
    Planted(
        "cleared between parts",
        "        loss.backward()\n        optimizer.step()\n",
        "        (loss / 2).backward()\n        step = step + 1 if 'step' in dir() else 1\n"
        "        if step % 2 == 0:\n            optimizer.step()\n",
        "optimizer.zero_grad()",
    ),
    Planted(
        "same random numbers",
        "range(3):\n",
        "range(3):\n    torch.manual_seed(1)\n",
        "manual_seed(1)",
    ),
    Planted(
        "dead", "optimizer = ", "nn.init.constant_(model[0].bias, -50)\noptimizer = ", "constant_"
    ),
    Planted(
        "loss is maximized",
        "F.cross_entropy(model(a), b)",
        "(model(a) - model(a).logsumexp(1, True)).gather(1, b[:, None]).mean()",
        "backward",
    ),
]
HEALTHY = {
    "as it is": ("", ""),
    "frozen on purpose": (
        "optimizer = torch.optim.Adam(model.parameters()",
        "model[0].requires_grad_(False)\noptimizer = torch.optim.Adam(model[2:].parameters()",
    ),
    "one batch by heart": ("for a, b in loader:", "for a, b in [(x[:16], y[:16])] * 16:"),
    "accumulated": (
        "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n",
        "        (loss / 2).backward()\n        step = step + 1 if 'step' in dir() else 1\n"
        "        if step % 2 == 0:\n            optimizer.step()\n            optimizer.zero_grad()\n",
    ),
    "attacked": (  # what the first backward computes is cleared, and meant for the inputs
        "        optimizer.zero_grad()\n",
        "        attacked = a.clone().requires_grad_()\n"
        "        F.cross_entropy(model(attacked), b).backward()\n"
        "        optimizer.zero_grad()\n"
        "        loss = F.cross_entropy(model(a + 0.05 * attacked.grad.sign()), b)\n",
    ),
    "penalized": (
        "        optimizer.zero_grad()\n",
        "        point = a.clone().requires_grad_()\n"
        "        (slope,) = torch.autograd.grad(model(point).sum(), point, create_graph=True)\n"
        "        loss = loss + 0.01 * slope.square().mean()\n"
        "        optimizer.zero_grad()\n",
    ),
    "first layer normalizes": (
        "model = nn.Sequential(",
        "x *= 200\nmodel = nn.Sequential(nn.BatchNorm1d(8), ",
    ),
    "sum": ("(model(a), b)", "(model(a), b, reduction='sum') / len(b)"),
}


def script_of(old: str, new: str) -> str:
    source = HEAD + LOOP
    assert old in source
    return source.replace(old, new) if old else source


def run(folder: Path, source: str, *, watched: bool) -> "subprocess.CompletedProcess[str]":
    file = folder / "train.py"
    file.write_text(source)
    environment = {**os.environ, "HOME": f"{folder}"}
    if watched:
        Plan(watches=False, steps=40, seconds=4.0, learning=True).write(folder)
        paths = [str(Path(startup.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {"FLAMBEAU_WATCH": f"{folder}", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, f"{file}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


def findings(folder: Path, source: str) -> list[Finding]:
    run(folder, source, watched=True)
    files = folder.glob("[0-9]*[0-9].json")
    return findings_of([json.loads(file.read_text())["learning"] for file in files])


def check_planted(planted: Planted, folder: Path) -> None:
    source = script_of(planted.old, planted.new)
    if planted.kind == "eval mode":  # the modes of this network must differ
        source = source.replace("nn.ReLU()", "nn.Dropout(0.1), nn.ReLU()")
    found = [one for one in findings(folder, source) if one.kind == planted.kind]
    assert found, planted.kind
    number = int(found[0].where.rpartition(":")[2])
    assert planted.line in source.splitlines()[number - 1]
    assert found[0].rule == planted.rule


@pytest.mark.parametrize("planted", PLANTED[:2], ids=lambda one: one.kind)
def test_a_mistake_is_named_with_its_line(planted: Planted, tmp_path: Path) -> None:
    check_planted(planted, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED[2:], ids=lambda one: one.kind)
def test_each_mistake_is_named_with_its_line(planted: Planted, tmp_path: Path) -> None:
    check_planted(planted, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_script_is_not_accused(name: str, tmp_path: Path) -> None:
    assert findings(tmp_path, script_of(*HEALTHY[name])) == []


def test_a_watched_script_computes_the_same_bits(tmp_path: Path) -> None:
    source = script_of("nn.ReLU()", "nn.Dropout(0.5), nn.ReLU()")
    alone = run(tmp_path, source, watched=False).stdout
    assert alone.count("\n") == 48
    assert run(tmp_path, source, watched=True).stdout == alone


def test_the_command_answers_and_leaves_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = script_of("model(a)", "model(a).softmax(1)") + "open('train.py', 'w').close()\n"
    Path("train.py").write_text(source)
    words = ["doctor", "--learning", "--seconds", "0.5", "--json", "--", "train.py"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    (first, *_) = told["findings"]
    assert first["kind"] == "softmax before cross_entropy" and first["rule"] == "FLB404"
    assert first["where"].endswith("train.py:13") and first["sure"] == "certain"
    assert Path("train.py").read_text() == source and os.listdir() == ["train.py"]  # noqa: PTH208


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--learning", "resnet18"], "only for a script"),
        (["--learning", "--no-trials", "--", "train.py"], "--no-trials"),
        (["--learning", "--trace", "t.json", "--", "train.py"], "--trace"),
        (["--learning", "--rounds", "2", "--", "train.py"], "--rounds"),
        (["--learning", "--budget", "90s", "--", "train.py"], "--budget"),
    ],
)
def test_flags_without_effect_are_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


RANKS = """\
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(128, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
sampler = DistributedSampler(data) if sys.argv[1] == "split" else None
loader = DataLoader(data, batch_size=8, sampler=sampler, shuffle=sampler is None)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
if sys.argv[1] == "own":
    torch.manual_seed(dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(4):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for a, b in loader:
        loss = nn.functional.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "found"),
    [
        ("none", [("ranks repeat samples", "certain")]),
        ("own", [("ranks repeat samples", "look")]),
        ("split", []),
    ],
)
def test_ranks_that_read_the_same_samples_are_named(
    sampler: str, found: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(RANKS)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert main(["doctor", "--learning", "--json", "--", *ranks, "train.py", sampler]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["processes"] == 2
    assert [(one["kind"], one["sure"]) for one in told["findings"]] == found


@pytest.mark.slow
def test_trainings_side_by_side_may_read_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(HEAD + LOOP)
    Path("both.py").write_text(
        "import subprocess, sys\n"
        "both = [subprocess.Popen([sys.executable, 'train.py']) for _ in range(2)]\n"
        "assert not any(one.wait() for one in both)\n"
    )
    assert main(["doctor", "--learning", "--json", "--", "both.py"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["processes"], told["findings"]) == (2, [])


def told_of(folder: Path, source: str, *words: str) -> dict[str, Any]:
    """What the command says of a script, as a program reads it."""
    (folder / "train.py").write_text(source)
    command = [sys.executable, "-m", "flambeau", "doctor", "--learning", "--json", *words]
    done = subprocess.run(
        [*command, "--", "train.py"],
        cwd=folder,
        env={**os.environ, "HOME": f"{folder}"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_script_that_crashes_is_no_healthy_one(tmp_path: Path) -> None:
    source = script_of("optimizer.step()", "optimizer.step(); assert loss > 1, 'disk full'")
    told = told_of(tmp_path, source)
    assert told["steps"] == 1 and "disk full" in told["verdict"]
    assert told["crash"].startswith("the script ended with code 1")


@pytest.mark.slow
def test_of_long_steps_those_before_the_limit_are_told(tmp_path: Path) -> None:
    source = script_of("model(a)", "model(a).softmax(1)") + "        import time; time.sleep(3)\n"
    told = told_of(tmp_path, source, "--limit", "20s")
    assert 2 <= told["steps"] <= 6 and told["crash"] is None
    assert told["findings"][0]["kind"] == "softmax before cross_entropy"


@pytest.mark.slow
def test_no_batch_is_learned_by_heart_beyond_the_limit(tmp_path: Path) -> None:
    """Two passes of five seconds each would end after the script is ended, and with it all was lost."""
    slow = "class Slow(nn.ReLU):\n    def forward(self, x):\n        import time; time.sleep(5)\n"
    source = script_of("nn.ReLU()", "Slow()").replace("lr=1e-2", "lr=0.0")
    source = source.replace("model =", slow + "        return super().forward(x)\nmodel =", 1)
    told = told_of(tmp_path, source, "--limit", "20s")
    assert 1 <= told["steps"] <= 3 and told["crash"] is None


COMPILED = """\
model = torch.compile(model, fullgraph=True)
@torch.jit.script
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * F.dropout(x, 0.0)
"""


@pytest.mark.slow
def test_a_compiled_model_is_watched(tmp_path: Path) -> None:
    source = script_of("model(a)", "doubled(model(a)).softmax(1)")
    told = told_of(tmp_path, source.replace("optimizer =", COMPILED + "optimizer =", 1))
    assert told["steps"] == 48
    assert [one["kind"] for one in told["findings"]] == ["softmax before cross_entropy"]


def test_metrics_that_have_no_hash_yet_are_watched(tmp_path: Path) -> None:
    metric = (
        "class Metric(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.total = 0\n"
        "    def __hash__(self):\n        return hash(self.total)\n"
        "Metric()\n"
    )
    assert findings(tmp_path, script_of("", "").replace("model =", f"{metric}model =", 1)) == []


def test_the_optimizer_of_a_wrapper_is_the_one_of_the_schedule(tmp_path: Path) -> None:
    wrapper = (
        "class Wrapper(torch.optim.Optimizer):  # as Accelerate's\n"
        "    def __init__(self, optimizer):\n        self.optimizer = optimizer\n"
        "    param_groups = property(lambda self: self.optimizer.param_groups)\n"
        "    def step(self):\n        self.optimizer.step()\n"
        "    def zero_grad(self):\n        self.optimizer.zero_grad()\n"
        "wrapped = Wrapper(optimizer)\n"
        "schedule = torch.optim.lr_scheduler.LambdaLR(wrapped, lambda step: 0.0)\n"
    )
    source = (
        HEAD
        + wrapper
        + LOOP.replace("optimizer.", "wrapped.").replace(
            "        print", "        schedule.step()\n        print"
        )
    )
    (found,) = findings(tmp_path, source)
    assert found.kind == "rate is zero"
    line = source.splitlines()[int(found.where.rpartition(":")[2]) - 1]
    assert line.startswith("schedule = ")


SCRIPTS = Path(__file__).parent
# Of planted scripts what is said first; their lines stand in found.tsv.
KINDS = {
    "rate_too_large.py": "rate too large",
    "rate_too_small.py": "rate too small",
    "labels_wrapped.py": "classes never come",
    "argmax_wrong_axis.py": "argmax over samples",
    "normalized_twice.py": "inputs hardly differ",
    "same_item_each_time.py": "same rows",
    "ignore_index_missing.py": "padding in the loss",
    "loss_times_zero.py": "part times zero",
    "log_softmax_twice.py": "log_softmax before cross_entropy",
    "parameter_listed_twice.py": "listed twice",
    "overlapping_slices.py": "validation in training",
    "loss_summed_over_steps.py": "losses add up",
    "ema_shares_storage.py": "average of itself",
    "ema_never_moves.py": "average hardly moves",
    "generator_gets_both_gradients.py": "gradients of two losses",
    "pixels_mixed_by_view.py": "channels mixed",
    "policy_sign_wrong.py": "sign of the policy",
    "closure_never_clears.py": "no zero_grad",
    "frozen_by_accident.py": "frozen",
    "batchnorm_stale.py": "stale statistics",
    "batchnorm_batch_two.py": "tiny batches",
    "weight_decay_ten.py": "decay too large",
    "permuted_apart.py": "permuted apart",
    "loss_maximized.py": "loss is maximized",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_planted_mistake_is_named_by_its_kind_and_line(name: str, tmp_path: Path) -> None:
    planted = SCRIPTS / "planted"
    table = (planted / "found.tsv").read_text(encoding="utf-8").splitlines()
    lines = next(row for row in table if row.startswith(name)).split("\t")[2].split(",")
    found = findings(tmp_path, (planted / name).read_text(encoding="utf-8"))
    named = [one.where.rpartition(":")[2] for one in found if one.kind == KINDS[name]]
    assert set(named) & set(lines), found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("files_sorted_apart.py", "only by heart"), ("normalized_twice.py", "batch not learned")],
)
def test_where_the_loss_does_not_fall_a_batch_is_learned_by_heart(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flambeau.tune.learning.run_learning.CHECKS", ())
    source = (SCRIPTS / "planted" / name).read_text(encoding="utf-8")
    assert [one.kind for one in findings(tmp_path, source)] == [kind]


@pytest.mark.slow
def test_a_rate_that_is_too_large_comes_with_a_better_one(tmp_path: Path) -> None:
    source = (SCRIPTS / "planted" / "rate_too_large.py").read_text(encoding="utf-8")
    (found,) = findings(tmp_path, source)
    assert "lr=0.03 took the loss from 1.43 to" in found.change


@pytest.mark.slow
def test_heads_that_are_joined_are_no_mixed_channels(tmp_path: Path) -> None:
    """(N, T, H, D) to (N * T, H * D), where T is by chance as large as H * D."""
    heads = (
        "attention = nn.Linear(8, 256)\n"
        "def joined(a):\n"
        "    return attention(a).view(len(a), 16, 4, 4).reshape(-1, 16).view(len(a), 256)[:, :8]\n"
    )
    source = script_of("model(a)", "model(joined(a))").replace("optimizer =", f"{heads}optimizer =")
    parameters = "[*model.parameters(), *attention.parameters()]"
    assert findings(tmp_path, source.replace("model.parameters()", parameters)) == []


def test_gradients_that_are_cleared_too_soon_were_there(tmp_path: Path) -> None:
    early = "loss.backward()\n        optimizer.zero_grad()"
    source = script_of("optimizer.zero_grad()\n        loss.backward()", early)
    assert [one.kind for one in findings(tmp_path, source)] == ["zero_grad before step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.manual_seed(0)", "torch.set_default_dtype(torch.float64)"),
        ("model(a)", "torch.func.functional_call(model, dict(model.named_parameters()), (a,))"),
        ("model(a)", "torch.vmap(model)(a)"),
    ],
)
def test_doubles_and_transformed_functions_are_watched(old: str, new: str, tmp_path: Path) -> None:
    assert findings(tmp_path, script_of(old, new)) == []
