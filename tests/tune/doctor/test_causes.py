"""What is made of the figures of a watched run: made-up runs, each with one thing wrong."""

from pathlib import Path
from typing import Any

import pytest

from flambeau.tune.doctor.causes import findings_of
from flambeau.tune.doctor.formatting import graph_breaks_line
from flambeau.tune.doctor.machine_watch import MachineWatch
from flambeau.tune.doctor.paired_test import Gain, gain_of
from flambeau.tune.doctor.remedies import Remedy, remedies_for
from flambeau.tune.doctor.remedy_trials import Tried, causes_after_trials, try_remedies
from flambeau.tune.doctor.shares import shares_of
from flambeau.tune.doctor.trial import Trial
from flambeau.tune.watch.plan import Plan
from replaced_trials import answer_of, replace_trials, script

FILE = "/home/me/train.py"


def row(phase: str, seconds: float, *, kind: str = "", waits: str = "", line: int = 7) -> list[Any]:
    return ["main", phase, kind, waits, FILE, line, "main", seconds]


def trainer(*rows: list[Any], waited: float = 0.0, **other: Any) -> dict[str, Any]:
    """A process that was seen for ten seconds and a hundred steps."""
    loader = {"num_workers": 2, "batch_size": 8, "persistent_workers": False, "pin_memory": False}
    return {
        "steps": 100, "seconds": 10.0, "step_s": 0.1, "batches": 100, "waited_s": waited,
        "started_s": 0.0, "seen": list(rows), "rank": 0, "world": 1, "anomaly": False,
        "threads": 1, "process_threads": 4, "device": "cpu", "graphs": 0,
        "loader": {**loader, "place": [FILE, 3, "main"]},
        "optimizer": {
            "name": "AdamW", "tensors": 10, "fused": False, "can_fuse": True, "is_torchs": True,
            "has_convolutions": True,
        },
        "operations": {"count": 100, "seconds": 0.09, "small_s": 0.01, "memory_bound": 0.1},
        **other,
    }  # fmt: skip


def worker(*rows: list[Any]) -> dict[str, Any]:
    return {"seen": list(rows), "process_threads": 5}


MODEL = (row("forward", 3.0), row("backward", 5.0))


def first(*trainers: dict[str, Any], workers: tuple[dict[str, Any], ...] = ()) -> tuple[str, str]:
    found = findings_of(Trial(list(trainers), list(workers))).causes[0]
    return found.kind, found.where


def test_shares_add_up_and_waiting_is_the_clocks() -> None:
    one = trainer(*MODEL, row("data", 9.0), row("", 2.0), waited=2.5)
    shares = shares_of(one)
    assert shares["data"] == pytest.approx(0.25)
    assert shares["forward"] == pytest.approx(0.75 * 3 / 10)
    assert sum(shares.values()) == pytest.approx(1)


def test_without_a_dataloader_the_looks_say_what_data_take() -> None:
    one = trainer(row("data", 4.0), row("forward", 6.0)) | {"batches": 0}
    assert shares_of(one)["data"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("kind", "waits", "cause"),
    [
        ("decode", "", "decode"),
        ("decode", "sleep", "read"),  # a decoder does not sleep: its file is slow
        ("", "file", "read"),
        ("", "sleep", "transform"),
        ("transform", "", "transform"),
        ("collate", "", "collate"),
        ("send", "", "send"),
    ],
)
def test_what_workers_do_is_what_is_waited_for(kind: str, waits: str, cause: str) -> None:
    busy = row("worker", 8.0, kind=kind, waits=waits, line=12)
    idle = row("worker", 90.0, kind="idle", waits="message", line=0)
    found = first(trainer(*MODEL, waited=4.0), workers=(worker(busy, idle),))
    assert found == (cause, f"{FILE}:12")


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("return zlib.decompress(self.blobs[index])", "decode"),
        ("record = json.loads(line)", "decode"),
        ("return cv2.imread(path)[..., ::-1]", "decode"),
        ("label = db.execute(QUERY, (name,)).fetchone()", "read"),
        ("names = os.listdir(self.folder)", "read"),
        ("return self.table[index]", "transform"),
    ],
)
def test_c_code_that_a_line_calls_says_what_it_does(line: str, cause: str, tmp_path: Path) -> None:
    file = tmp_path / "data.py"
    file.write_text(f"{line}\n")
    busy = ["main", "worker", "", "", f"{file}", 1, "__getitem__", 8.0]
    assert first(trainer(*MODEL, waited=4.0), workers=(worker(busy),)) == (cause, f"{file}:1")


def test_batches_that_a_thread_of_the_script_makes() -> None:
    made = ["producer", "data", "decode", "", FILE, 31, "work", 7.0]
    one = trainer(row("data", 8.0, kind="idle", line=12), row("forward", 2.0), made, loader={})
    (cause, *_) = findings_of(Trial([one | {"batches": 0}], [])).causes
    assert (cause.kind, cause.where, cause.share) == ("decode", f"{FILE}:31", 0.8)
    assert "they are made by a thread of the script" in cause.text
    (alone, *_) = findings_of(Trial([one | {"batches": 0, "seen": one["seen"][:2]}], [])).causes
    assert alone.where == f"{FILE}:12", "as where no thread is seen"


def test_workers_that_start_again_in_each_epoch() -> None:
    one = trainer(*MODEL, waited=1.0, started_s=5.0)
    assert first(one, workers=(worker(row("worker", 1.0)),)) == ("worker start", f"{FILE}:3")


@pytest.mark.parametrize(
    ("workers", "waits", "cause"),
    [(24, "", "many workers"), (24, "sleep", "worker start"), (4, "", "worker start")],
)
def test_more_workers_than_cpus_that_start_again(
    workers: int, waits: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flambeau.tune.doctor.causes.usable_cpus", lambda: 2)
    one = trainer(*MODEL, waited=1.0, started_s=5.0)
    one["loader"]["num_workers"] = workers
    assert first(one, workers=(worker(row("worker", 1.0, waits=waits)),))[0] == cause


def test_a_line_that_waits_for_the_device() -> None:
    one = trainer(
        *MODEL, row("", 2.0, line=21), waiting_calls=[[FILE, 21, ".item()", 60.0, 0.001, 0]]
    )
    assert first(one) == ("sync", f"{FILE}:21")


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("history = history + [loss.item()]", "python"),
        ("table[losses['sum'].tolist()] = sorted(table)", "python"),
        ("print(f'{loss.item()}', sorted(table))", "python"),
        ("shown.append((float(loss), sorted(table)))", "python"),
        ("if torch.isnan(x).any():", "sync"),
        ("worst = (x - y).abs().max().item()", "sync"),
        ("count[labels[i].item()] += 1", "sync"),
        ("metric.update(x)", "sync"),
    ],
)
def test_a_short_call_is_not_to_blame_for_the_rest_of_its_line(
    line: str, cause: str, tmp_path: Path
) -> None:
    """The call takes 1 of the 40 ms of its line; what it asks for is computed there, or was before."""
    file = tmp_path / "train.py"
    file.write_text(f"while True:\n    {line}\n{'        pass' * line.startswith('if')}\n")
    seen = ["main", "", "", "", f"{file}", 2, "<module>", 4.0]
    one = trainer(*MODEL, seen, waiting_calls=[[f"{file}", 2, ".item()", 1.0, 0.001, 0]])
    found = findings_of(Trial([one], [])).causes[0]
    assert (found.kind, found.where) == (cause, f"{file}:2")
    assert "device" not in found.text, "it has none"


def test_copies_to_the_device_are_no_waiting_lines() -> None:
    one = trainer(*MODEL, waiting_calls=[[FILE, 21, "copy to cuda, not pinned", 1.0, 0.05, 2**20]])
    assert first(one) == ("copy", f"{FILE}:21")


def test_the_line_of_a_copy_is_not_told_as_python_again() -> None:
    calls = [[FILE, 21, "copy to cuda, not pinned", 1.0, 0.05, 2**20]]
    rows = row("", 5.0, line=21), row("", 1.0, line=22)
    causes = findings_of(Trial([trainer(*MODEL, *rows, waiting_calls=calls)], [])).causes
    places = [(cause.kind, cause.where) for cause in causes if cause.kind in ("copy", "python")]
    assert places == [("copy", f"{FILE}:21"), ("python", f"{FILE}:22")]


@pytest.mark.parametrize(
    ("is_torchs", "can_fuse", "where", "end"),
    [
        (True, True, "", "(AdamW of 10 tensors, not fused)"),
        (True, False, "", "(AdamW of 10 tensors)"),
        (False, True, f"{FILE}:31", f"(AdamW of 10 tensors), at {FILE}:31"),
    ],
)
def test_an_optimizer_of_the_script_is_not_told_to_be_fused(
    is_torchs: bool, can_fuse: bool, where: str, end: str
) -> None:
    one = trainer(*MODEL, row("optimizer", 9.0, line=31), row("optimizer", 1.0))
    one["optimizer"] |= {"is_torchs": is_torchs, "can_fuse": can_fuse}
    (cause, *_) = findings_of(Trial([one], [])).causes
    assert (cause.kind, cause.where) == ("optimizer", where) and cause.text.endswith(end)


def test_a_tracer_that_was_left_on_comes_first() -> None:
    found = findings_of(Trial([trainer(*MODEL, row("", 9.0), tracer="Pdb.trace_dispatch")], []))
    assert found.causes[0].kind == "debug mode" and "Pdb.trace_dispatch" in found.causes[0].text
    assert remedies_for(found)[0].name == "no tracer"


def test_tracemalloc_that_was_left_on_comes_first() -> None:
    found = findings_of(Trial([trainer(*MODEL, row("", 9.0), traces_memory=True)], []))
    assert found.causes[0].kind == "debug mode" and "tracemalloc" in found.causes[0].text
    assert remedies_for(found)[0].change == {"no_tracemalloc": True}


@pytest.mark.parametrize(
    ("phase", "cause"),
    [("", "python"), ("optimizer", "optimizer"), ("evaluation", "evaluation"),
     ("checkpoint", "checkpoint"), ("compile", "compile")],
)  # fmt: skip
def test_a_long_part_of_the_step_comes_before_the_model(phase: str, cause: str) -> None:
    assert first(trainer(*MODEL, row(phase, 3.0)))[0] == cause


def test_nothing_but_the_model() -> None:
    assert first(trainer(*MODEL, row("optimizer", 0.5), waited=0.2))[0] == "model"


def test_many_small_operations() -> None:
    small = {"count": 4000, "seconds": 0.02, "small_s": 0.016, "memory_bound": 0}
    assert first(trainer(*MODEL, operations=small))[0] == "small steps"
    rows = [row("forward", 1.0, line=line) for line in range(3)] + [row("backward", 5.0)]
    waiting = findings_of(Trial([trainer(*rows, waited=8.0, operations=small)], [])).causes
    (told,) = [cause.text for cause in waiting if cause.kind == "small steps"]
    assert told.startswith("20 ms of a step are 4000 operations of 5 us: ")  # the rest is waiting
    # Views and wrappers are many, too, where a few convolutions take the time.
    views = {"count": 100, "seconds": 0.05, "small_s": 0.0001}
    assert first(trainer(*MODEL, operations=small | views))[0] == "model"


def test_a_line_that_makes_most_of_many_operations_is_named() -> None:
    """A loss that is added up element by element; the backward pass has no lines of its own."""
    small = {"count": 4000, "seconds": 0.02, "small_s": 0.016, "memory_bound": 0}
    rows = row("forward", 2.0, line=32), row("forward", 1.0), row("backward", 5.0)
    found = findings_of(Trial([trainer(*rows, operations=small)], [])).causes[0]
    assert (found.kind, found.where) == ("small steps", f"{FILE}:32")
    assert "in place of a loop" in found.text and "larger batches" not in found.text
    spread = [row("forward", 1.0, line=line) for line in range(3)]
    fewer = small | {"count": 1000, "seconds": 0.005, "small_s": 0.004}
    for one in (trainer(*spread, operations=small), trainer(*rows, waited=8.0, operations=fewer)):
        causes = findings_of(Trial([one], [])).causes
        (plain,) = [cause for cause in causes if cause.kind == "small steps"]
        assert plain.where == "" and "larger batches" in plain.text


def test_few_small_operations_are_not_the_time_of_a_long_step() -> None:
    """82 of 4 us take 0.3 ms, so 100 ms of a step are something else."""
    few = {"count": 82, "seconds": 0.00033, "small_s": 0.0003, "memory_bound": 0}
    found = findings_of(Trial([trainer(*MODEL, operations=few)], [])).causes[0]
    assert (found.kind, found.share) == ("python", 1.0)
    assert "operations of" not in found.text and "torch.compile" not in found.text


def test_a_long_line_between_the_parts_is_not_the_time_of_small_operations() -> None:
    """A query of 70 ms in a step of 100 ms; the operations and their starts take 27 ms."""
    small = {"count": 5000, "seconds": 0.012, "small_s": 0.011, "memory_bound": 0}
    rows = row("forward", 1.0), row("backward", 1.0), row("", 1.0), row("", 7.0, line=33)
    found = findings_of(Trial([trainer(*rows, operations=small)], [])).causes
    assert (found[0].kind, found[0].where) == ("python", f"{FILE}:33")
    (told,) = [cause for cause in found if cause.kind == "small steps"]
    assert told.text.startswith("30 ms of a step are 5000 operations of 2 us, ")
    assert told.share == pytest.approx(0.3)


@pytest.mark.parametrize(("graphs", "cause"), [(0, "python"), (1, "model")])
def test_a_loss_that_is_mostly_no_operation_of_torch(graphs: int, cause: str) -> None:
    """`bank[list]` makes a tensor of the list; a compiled model has kernels of its own."""
    large = {"count": 40, "seconds": 0.02, "small_s": 0.0001, "memory_bound": 0}
    rows = row("forward", 6.0, line=21), row("forward", 1.0), row("backward", 3.0)
    one = trainer(*rows, operations=large, graphs=graphs)
    assert first(one) == (cause, f"{FILE}:21" if cause == "python" else "")
    of_the_line = large | {"count": 420, "seconds": 0.02}  # most starts are of other lines
    assert first(trainer(*rows, operations=of_the_line, graphs=graphs))[0] == cause
    many_lines = [row("forward", 1.0, line=line) for line in range(10)]
    assert first(trainer(*many_lines, operations=large, graphs=graphs))[0] == "model"


@pytest.mark.parametrize(("computes", "kind"), [(0.3, "python"), (0.97, "model")])
def test_a_thread_that_takes_the_interpreters_lock(computes: float, kind: str) -> None:
    """A thread that computes beside it hinders a training only as far as that one has no CPU."""
    polls = ["companion99", "", "", "", FILE, 37, "wait", 9.0]
    runs = [[7, computes], [99, 0.95], [55, 1.0]]  # the last one is a thread of torch
    one = trainer(*MODEL, polls, thread=7, runs=runs)
    found = findings_of(Trial([one], [])).causes[0]
    assert found.kind == kind
    if kind == "python":
        assert (found.where, found.share) == (f"{FILE}:37", pytest.approx(0.7))
        assert "another thread of the script computes" in found.text


@pytest.mark.parametrize(("fastest", "cause"), [(0.016, "small steps"), (0.1, "model")])
def test_many_operations_on_a_busy_machine(fastest: float, cause: str) -> None:
    """Some were interrupted in each step that was profiled; the fastest step of the window was not."""
    interrupted = {"count": 3171, "seconds": 0.012, "small_s": 0.003, "memory_bound": 0}
    one = trainer(*MODEL, operations=interrupted, times=[0.22, fastest, 0.3])
    assert first(one)[0] == cause


@pytest.mark.parametrize(("device_s", "cause"), [(0.03, "small steps"), (0.09, "model")])
def test_a_device_that_waits_for_python(device_s: float, cause: str) -> None:
    assert first(on_gpu(device_s, *MODEL))[0] == cause


def test_operations_bound_by_memory_are_told() -> None:
    operations = {"count": 100, "seconds": 0.09, "small_s": 0.01, "memory_bound": 0.4}
    (cause,) = findings_of(Trial([trainer(*MODEL, operations=operations)], [])).causes
    assert cause.text.endswith("; 40 % of that in operations bound by memory, such as batch norm")


def on_gpu(
    device_s: float, *rows: list[Any], active_s: float = 0.0, **other: Any
) -> dict[str, Any]:
    """A step of a tenth of a second, of which the GPU computes so much, and is active a bit longer."""
    operations = {
        "count": 90, "seconds": 0.05, "small_s": 0, "memory_bound": 0, "device_s": device_s,
        "active_s": active_s or device_s,
    }  # fmt: skip
    return trainer(*rows, device="cuda", operations=operations, **other)


def test_what_the_host_waits_for_while_its_gpu_computes_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of a step in `.item()`: the time of the kernels that were asked for before."""
    monkeypatch.setattr("flambeau.tune.doctor.remedies.native_bf16", lambda device: True)
    rows = row("forward", 2.0), row("backward", 3.0), row("", 5.0, line=30)
    calls = [[FILE, 30, ".item()", 1.0, 0.05, 0]]
    busy = on_gpu(0.092, *rows, waiting_calls=calls)
    causes = findings_of(Trial([busy], [])).causes
    assert (causes[0].kind, causes[0].share) == ("model", pytest.approx(0.92))
    (sync,) = (one for one in causes if one.kind == "sync")
    assert sync.share == pytest.approx(0.08) and "computes 92 % of the time" in sync.text
    assert names(busy)["skip waiting calls"] == pytest.approx(1 / 0.92)
    idle = on_gpu(0.06, *rows, waiting_calls=calls)
    assert first(idle) == ("sync", f"{FILE}:30")
    assert names(idle)["skip waiting calls"] == pytest.approx(1 / 0.6)
    # Half of what it computes is the most that a smaller dtype saves, whatever Python takes to start it.
    assert names(idle)["tf32"] == pytest.approx(1 / 0.7)


def test_a_gpu_that_waits_for_data_does_not_wait_for_python() -> None:
    one = on_gpu(0.05, *MODEL, waited=4.5)
    causes = findings_of(Trial([one], [worker(row("worker", 5.0, waits="sleep"))])).causes
    assert causes[0].share == pytest.approx(0.45) and "waits for data 45 %" in causes[0].text
    assert "small steps" not in {cause.kind for cause in causes}


def test_a_gpu_that_copies_or_waits_for_other_processes_does_not_wait_for_python() -> None:
    """Active for nine tenths of a step, four of which it computes."""
    causes = findings_of(Trial([on_gpu(0.04, *MODEL, active_s=0.09)], [])).causes
    assert [cause.kind for cause in causes] == ["model"] and causes[0].share == pytest.approx(0.4)


def test_of_several_ranks_the_gpu_that_computes_least_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one waits in an exchange for the rank that waits for data."""
    monkeypatch.setattr("flambeau.tune.doctor.remedies.native_bf16", lambda device: True)
    ranks = [on_gpu(0.09, *MODEL, waited=1.0), on_gpu(0.04, *MODEL, waited=6.0) | {"rank": 1}]
    busy = worker(row("worker", 5.0, kind="decode", line=12))
    found = findings_of(Trial(ranks, [busy]))
    assert found.causes[0].kind == "decode" and found.causes[0].share == pytest.approx(0.35)
    assert "cached batches" in {one.name for one in remedies_for(found)}


def test_profiled_steps_that_are_much_longer_than_others_say_nothing() -> None:
    one = on_gpu(0.2, *MODEL, waited=4.0)
    causes = findings_of(Trial([one], [worker(row("worker", 5.0, kind="decode", line=12))])).causes
    assert (causes[0].kind, causes[0].share) == ("decode", pytest.approx(0.4))


def test_work_in_the_line_of_a_copy_is_told() -> None:
    calls = [[FILE, 21, "copy to cuda, not pinned", 1.0, 0.002, 2**20]]
    rows = row("", 5.0, line=21), row("forward", 2.0), row("backward", 3.0)
    causes = findings_of(Trial([on_gpu(0.3 * 0.1, *rows, waiting_calls=calls)], [])).causes
    assert (causes[0].kind, causes[0].where) == ("python", f"{FILE}:21")
    assert causes[0].share == pytest.approx(0.48)
    assert "small steps" not in {cause.kind for cause in causes}


def test_the_rank_that_waits_least_is_the_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flambeau.tune.doctor.causes.usable_cpus", lambda: 8)
    quick = trainer(row("forward", 2.0), row("backward", 8.0))
    slow = trainer(row("forward", 2.0), row("", 5.0, line=33), row("backward", 3.0)) | {"rank": 1}
    assert first(quick, slow) == ("slow rank", f"{FILE}:33")


def test_a_quota_that_is_used_up() -> None:
    machine = MachineWatch(Path("/nowhere"))
    machine.throttled_share = 0.4
    found = findings_of(Trial([trainer(*MODEL)], machine=machine)).causes
    assert found[0].kind == "quota" and "40 %" in found[0].text


# ---------------------------------------------------------------- remedies


def names(one: dict[str, Any], *workers: dict[str, Any]) -> dict[str, float]:
    remedies = remedies_for(findings_of(Trial([one], list(workers))))
    return {remedy.name: remedy.predicted for remedy in remedies}


def test_workers_that_mostly_wait_are_to_be_more() -> None:
    asleep = worker(row("worker", 9.0, waits="sleep"))
    found = names(trainer(*MODEL, waited=5.0), asleep)
    assert found["cached batches"] == pytest.approx(2.0)
    order = [*found]  # what can be written comes before the bound, for time may be short
    assert order.index("workers=4") < order.index("cached batches")


def test_without_workers_nothing_is_sent() -> None:
    def found(kind: str) -> dict[str, float]:
        return names(trainer(*MODEL, waited=5.0), worker(row("worker", 9.0, kind=kind)))

    assert found("send")["workers=0"] == pytest.approx(2.0)
    assert "workers=0" not in found("transform")


def test_a_data_set_that_each_worker_gives_whole_gets_no_other_number_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = {
        "num_workers": 2,
        "persistent_workers": False,
        "pin_memory": False,
        "repeats": True,
        "shared": [],
    }
    one = trainer(*MODEL, waited=5.0, started_s=2.0, loader=loader)
    asleep = worker(row("worker", 9.0, waits="sleep"))
    remedies = remedies_for(findings_of(Trial([one], [asleep])))
    names = {remedy.name for remedy in remedies}
    assert "workers=7" in names and "persistent workers" not in names
    changed = [remedy for remedy in remedies if "workers" in remedy.change]
    replace_trials(monkeypatch, answer_of(Trial([one])))
    tried = try_remedies(script(), changed, Plan(), rounds=1, enough_s=60, say=print)
    assert all(found.gain is None and "gives every sample" in found.failure for found in tried)
    loader |= {"repeats": False, "shared": ["__main__.Records"]}
    found = remedies_for(findings_of(Trial([one], [asleep])))
    assert "persistent workers" in {remedy.name for remedy in found}
    change = next(remedy.change for remedy in found if remedy.name == "workers=7")
    assert change == {"workers": 7, "shared": ["__main__.Records"]}


def test_a_loader_that_is_made_anew_is_to_be_made_once() -> None:
    loader = trainer()["loader"] | {"is_made_anew": True}
    one = trainer(*MODEL, waited=1.0, started_s=6.0, loader=loader)
    found = findings_of(Trial([one], [worker(row("worker", 9.0, waits="sleep"))]))
    assert found.causes[0].kind == "worker start" and "make it once" in found.causes[0].text
    remedies = {remedy.name for remedy in remedies_for(found)}
    assert "one loader" in remedies and not remedies & {"cached batches", "prefetch=8"}
    assert not [name for name in remedies if name.startswith(("workers", "persistent"))]


@pytest.mark.parametrize(("seconds", "is_tried"), [(0.001, False), (0.035, True)])
def test_a_check_that_computes_is_not_left_out(seconds: float, is_tried: bool) -> None:
    """`if torch.isnan(x).any():` takes 40 ms, of which the call that waits takes `seconds`."""
    calls = [[FILE, 21, "if tensor", 1.0, seconds, 0]]
    one = trainer(*MODEL, row("", 5.0, line=21), waiting_calls=calls)
    remedies = remedies_for(findings_of(Trial([one], [])))
    (found,) = [one for one in remedies if one.name == "skip waiting calls"]
    assert (not found.refused) is is_tried
    assert found.predicted > 1.3, "from the profile"


def test_a_debug_mode_names_the_rule_of_the_linter() -> None:
    causes = findings_of(Trial([trainer(*MODEL, anomaly=True)], [])).causes
    (text,) = [one.text for one in causes if one.kind == "debug mode"]
    assert text.endswith("is on; flambeau lint rule FLB602")


def test_only_what_could_help_is_tried() -> None:
    found = names(trainer(*MODEL, row("optimizer", 2.0)))
    assert found["fused optimizer"] == pytest.approx(1.25)
    assert not {"cached batches", "skip waiting calls", "no anomaly mode"} & set(found)


OF_CUDA = {"fp16", "tf32", "cudnn.benchmark"}


@pytest.mark.parametrize(("device", "extra"), [("cpu", set()), ("cuda", OF_CUDA)])
def test_what_only_a_gpu_has(device: str, extra: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flambeau.tune.doctor.remedies.native_bf16", lambda device: True)
    found = names(trainer(*MODEL, device=device))
    assert OF_CUDA & set(found) == extra
    assert "bf16" in found
    one = trainer(*MODEL, device=device)
    one["optimizer"]["has_convolutions"] = False
    assert "cudnn.benchmark" not in names(one)


def test_fp16_is_chosen_where_its_trials_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without bfloat16 of its own, of which only simulated timings are known here."""
    monkeypatch.setattr("flambeau.tune.doctor.remedies.native_bf16", lambda device: False)

    def run(_: Any, plan: Plan, __: Path) -> Trial:
        times = {"float16": 2.0, None: 1.0}[plan.change.get("autocast")]
        return Trial([trainer(*MODEL) | {"step_s": 0.1 / times}])

    replace_trials(monkeypatch, run)
    remedies = remedies_for(findings_of(Trial([trainer(*MODEL, device="cuda")], [])))
    assert "bf16" not in {one.name for one in remedies}
    tried = try_remedies(script(), remedies, Plan(), rounds=2, enough_s=100, say=lambda text: None)
    gains = {one.remedy.name: one.gain for one in tried}
    assert gains["fp16"] is not None and gains["fp16"].times == pytest.approx(2.0)
    assert gains["tf32"] is not None and gains["tf32"].times == pytest.approx(1.0)


def test_an_optimizer_that_is_fused_already() -> None:
    one = trainer(*MODEL, row("optimizer", 2.0))
    one["optimizer"]["fused"] = True
    assert "fused optimizer" not in names(one)


def test_what_helps_becomes_the_cause() -> None:
    one = trainer(*MODEL, waited=4.0) | {"threads": 64}
    findings = findings_of(Trial([one], [worker(row("worker", 5.0, waits="sleep"))]))
    remedies = {remedy.name: remedy for remedy in remedies_for(findings)}
    quick = Gain(1.6, 1.5, 1.7)
    (threads,) = (name for name in remedies if name.startswith("threads="))
    causes = causes_after_trials(findings.causes, [Tried(remedies[threads], quick)])
    assert causes[0].kind == "threads" and causes[0].share == pytest.approx(1 - 1 / 1.6)
    unclear = causes_after_trials(findings.causes, [Tried(remedies[threads], Gain(1.6, 0.9, 2.9))])
    assert unclear[0].kind == "transform"


@pytest.mark.parametrize(
    ("file", "kind"),
    [(FILE, "transform"), ("/venv/lib/python3.11/site-packages/PIL/Image.py", "few workers")],
)
def test_more_workers_help_and_a_line_of_the_user_stays_the_cause(file: str, kind: str) -> None:
    asleep = ["main", "worker", "transform", "sleep", file, 7, "main", 5.0]
    findings = findings_of(Trial([trainer(*MODEL, waited=8.0)], [worker(asleep)]))
    assert (findings.causes[0].kind, findings.causes[0].where) == ("transform", f"{file}:7")
    more = next(one for one in remedies_for(findings) if one.kind == "few workers")
    causes = causes_after_trials(findings.causes, [Tried(more, Gain(4.0, 3.5, 4.5))])
    assert (causes[0].kind, causes[0].where) == (kind, f"{file}:7")
    assert causes[0].text.endswith("; more workers help")


@pytest.mark.parametrize(
    ("times", "kind"), [(5.1, "threads"), (1.2, "threads"), (1.0, "transform")]
)
def test_one_pair_of_runs_refutes_only_what_it_shows(times: float, kind: str) -> None:
    """Where no time was left for a second one: threads slow down all else, so they stay first."""
    one = trainer(*MODEL, waited=4.0) | {"threads": 64}
    findings = findings_of(Trial([one], [worker(row("worker", 5.0, waits="sleep"))]))
    assert findings.causes[0].kind == "threads"
    remedies = {remedy.name: remedy for remedy in remedies_for(findings)}
    (threads,) = (name for name in remedies if name.startswith("threads="))
    single = gain_of([times], [1.0])
    causes = causes_after_trials(findings.causes, [Tried(remedies[threads], single)])
    assert causes[0].kind == kind
    if times > 2:
        assert causes[0].share == pytest.approx(1 - 1 / times)


@pytest.mark.parametrize(("was_busy", "kind"), [(True, "threads"), (False, "transform")])
def test_one_pair_on_a_busy_machine_refutes_nothing(was_busy: bool, kind: str) -> None:
    one = trainer(*MODEL, waited=4.0) | {"threads": 64}
    findings = findings_of(Trial([one], [worker(row("worker", 5.0, waits="sleep"))]))
    remedies = {remedy.name: remedy for remedy in remedies_for(findings)}
    (threads,) = (name for name in remedies if name.startswith("threads="))
    for before in ([0.7], [1.3, 4.0]):  # one pair, and two that differ much
        tried = [Tried(remedies[threads], gain_of(before, [1.0] * len(before)))]
        assert causes_after_trials(findings.causes, tried, was_busy=was_busy)[0].kind == kind
    both = [Tried(remedies[threads], gain_of([1.6, 9.0], [1.0, 1.0]))]
    assert not both[0].gain or both[0].gain.verdict == "no difference seen"
    causes = causes_after_trials(findings.causes, both, was_busy=was_busy)
    assert (causes[0].kind, round(causes[0].share, 2)) == ("threads", 0.74)


@pytest.mark.parametrize(
    ("busy", "cause"), [((17, 16), "threads"), ((3, 3, 3, 3), "transform"), ((), "transform")]
)
def test_threads_of_workers_that_compute(
    busy: tuple[int, ...], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two per worker are one that makes batches and one that sends them; idle pools are not counted."""
    monkeypatch.setattr("flambeau.tune.doctor.causes.usable_cpus", lambda: 2)
    one = worker(row("worker", 5.0, kind="transform")) | {"process_threads": 60}
    workers = tuple(one | {"busy_threads": count} for count in busy) or (one,)
    assert first(trainer(*MODEL, waited=9.0), workers=workers)[0] == cause


def test_the_largest_gains_get_their_pairs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """First pairs take no more than their part of the time, and what has helped most is tried again."""
    speeds = {"a": 1.0, "b": 1.3, "c": 2.0, "d": 9.0}
    clock, tried = [0.0], list[str]()

    def run(_: Any, plan: Plan, __: Path) -> Trial:
        clock[0] += 10
        name = plan.change.get("name", "")
        tried.extend([name] if name else [])
        return Trial([trainer(*MODEL) | {"step_s": 1 / speeds.get(name, 1.0)}])

    replace_trials(monkeypatch, run)
    monkeypatch.setattr("flambeau.tune.doctor.remedy_trials.time.monotonic", lambda: clock[0])
    remedies = [Remedy(name, "", {"name": name}, 1.0, "model") for name in speeds]
    found = try_remedies(script(), remedies, Plan(), rounds=2, enough_s=100, say=lambda text: None)
    assert tried == ["a", "b", "c", "c", "b"]
    gains = {one.remedy.name: one.gain for one in found}
    assert gains["d"] is None and gains["a"] is not None and not gains["a"].is_tested
    assert gains["c"] is not None and gains["c"].verdict == "faster"


def test_compiling_says_how_many_graphs_it_made_in_the_window() -> None:
    one = trainer(row("compile", 6.0), *MODEL, graphs=30, graphs_in_window=20)
    cause = findings_of(Trial([one], [])).causes[0]
    assert cause.kind == "compile"
    assert "(20 graphs in 100 steps)" in cause.text


def test_graph_breaks_are_told_with_the_reason_that_came_most_often() -> None:
    one = trainer(*MODEL, graphs=4, graph_breaks={"a print": 2, "a branch": 1})
    line = graph_breaks_line(one)
    assert "has made 4 graphs" in line
    assert "graph breaks: 3, most often for: a print" in line
    assert graph_breaks_line(trainer(*MODEL)) == ""


@pytest.mark.parametrize(("held", "is_told"), [(95, True), (80, False)])
def test_a_device_that_is_nearly_full_is_told_with_its_rank(held: int, is_told: bool) -> None:
    full = trainer(*MODEL, rank=1, device_bytes=held << 30, device_limit_bytes=100 << 30)
    quiet = trainer(*MODEL, device_bytes=1 << 30, device_limit_bytes=100 << 30)
    texts = [cause.text for cause in findings_of(Trial([quiet, full], [])).causes]
    told = "tensors of rank 1 hold 95.0 of the 100.0 GiB of its device"
    assert (told in texts) is is_told
    assert not any("rank 0" in text for text in texts)


@pytest.mark.parametrize(
    ("faults", "system_s", "share"),
    [(1_000_000, 3.0, 0.15), (1_000_000, 0.4, 0.0), (100, 3.0, 0.0)],
    ids=["memory", "few seconds", "another call of the kernel"],
)
def test_memory_that_is_given_back_in_each_step(
    faults: int, system_s: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads compute, so the kernel's seconds are those of twice the time."""
    monkeypatch.setattr("flambeau.tune.doctor.causes.usable_cpus", lambda: 2)
    one = trainer(*MODEL, faults=faults, system_s=system_s) | {"threads": 2}
    found = findings_of(Trial([one]))
    causes = [cause for cause in found.causes if cause.kind == "page faults"]
    remedies = [remedy for remedy in remedies_for(found) if remedy.name == "keep freed memory"]
    if not share:
        assert (causes, remedies) == ([], [])
        return
    assert causes[0].share == pytest.approx(share)
    assert "10000 page faults, 15 % of the time" in causes[0].text
    assert remedies[0].change == {"keep_freed": True}
    assert "MALLOC_TRIM_THRESHOLD_=2147483647" in remedies[0].how


def test_threads_that_fight_in_workers_are_tried_before_what_they_slow_down() -> None:
    busy = worker(row("worker", 9.0, kind="transform")) | {"process_threads": 60}
    found = [*names(trainer(*MODEL, waited=9.0), busy, busy)]
    assert found[0] == "one thread per worker"
    assert "cached batches" in found
    assert not any(name.startswith("threads=") for name in found)  # the trainer has one
