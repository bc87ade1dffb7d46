"""Settings: what each refuses, how a file is read, and how two of them are compared."""

import dataclasses
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from flambeau.errors import InputError, nearest
from flambeau.images.pixels import MAX_CHANNELS
from flambeau.run.folder.identity import Identity, differences
from flambeau.run.options.durations import parse_duration
from flambeau.run.options.option import allowed_types, values_of
from flambeau.run.options.toml_file import as_toml
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import FIELDS, Settings
from flambeau.trainer.settings.stored_settings import canonical, from_stored, read_config

KINDS = {name: allowed_types(field)[0] for name, field in FIELDS.items()}
NUMBERS = [name for name, kind in KINDS.items() if kind in (int, float)]
FLOATS = [name for name, kind in KINDS.items() if kind is float]
TEXTS = [name for name, kind in KINDS.items() if kind is str]
WRONG_TYPE: dict[type, list[Any]] = {
    int: ["3", 3.0, True, [3], {}],
    float: ["3", True, [3.0]],
    str: [3, True, ["a"]],
    bool: [1, 0.0, "true"],
}
LOWEST = {  # refused just below
    "image_size": 8, "eval_size": 8, "start_size": 8, "skip_bad_images": 0, "workers": 0, "epochs": 1,
    "batch_size": 1, "accumulate": 1, "parts": 1, "portable_bits": 1, "keep": 1, "log_every": 1, "seed": 0,
    "patience": 0, "early_stop": 0, "retry_workers": 0, "channels": 1, "shuffle_window": 0,
}  # fmt: skip
RANGES = {  # good, then refused
    "channels": ([1, 4, MAX_CHANNELS], [0, MAX_CHANNELS + 1]),
    "bits": ([8, 16], [7, 12, 24]),
    "portable_bits": ([1, 256], [0, 257]),
    "ema": ([0, 0.5, 0.9999], [1, 1.5]),
    "label_smoothing": ([0, 0.1, 0.999], [1, 2]),
    "lr": ([1e-12, 1, 10], [0, -0.1]),
    "muon_others_lr": ([1e-12, 1, 280], [0, -0.1]),
    "weight_decay": ([0, 1e-4, 1], [-1e-4]),
    "clip_norm": ([0, 1e-3, 1], [-1e-3]),
    "stall_timeout": ([0, 0.5, 600], [-1e-3]),
    "mixup": ([0, 1e-6, 0.2, 1e6], [1e-7, 1e7]),
    "cutmix": ([0, 1e-6, 1, 1e6], [1e-7, 1e7]),
    "seed": ([0, 2**64 - 1], [2**64]),
    "random_erasing": ([0, 0.25, 1], [1.1]),
    "color_jitter": ([0, 0.4, 1], [1.1]),
    "subset": ([0.001, 0.5, 1], [0, 1.1]),
    "momentum": ([0, 0.9, 0.999], [1, 1.5]),
    "plateau_factor": ([1e-9, 0.5, 0.999], [0, 1, 1.5]),
    "crop_scale": ([1e-3, 0.08, 1], [0, 1.01]),
    "gamma": ([0.1, 1], [0, 1.5]),
    "ignore_index": ([0, 254, 255], [256]),
    "padding": ([0, 4, 63], [-1, 64]),
    "drop_path": ([0, 0.2, 0.999], [1]),
    "head_lr": ([1e-9, 0.1, 10], [0]),
    "layer_decay": ([1e-3, 0.75, 1], [0, 1.01]),
    "teacher_weight": ([0.01, 1], [0, 1.01]),
    "temperature": ([0.1, 1, 20], [0]),
}
NEEDS: dict[str, dict[str, str]] = {  # what a setting has no effect without
    "patience": {"schedule": "plateau"},
    "plateau_factor": {"schedule": "plateau"},
    "gamma": {"schedule": "multistep"},
    "teacher_weight": {"teacher": "runs/large"},
    "temperature": {"teacher": "runs/large"},
    "muon_others": {"optimizer": "muon"},
    "muon_others_lr": {"optimizer": "muon"},
}


def test_defaults_are_allowed() -> None:
    settings = Settings()
    assert values_of(settings)["schedule"] == "cosine"
    assert settings.data is None
    assert (settings.optimizer, settings.flip) == (None, None)  # by the task


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_a_range(name: str) -> None:
    with pytest.raises(InputError, match=rf"^{name} must be .*-1"):
        Settings(**{name: -1})


def test_every_number_is_tested() -> None:
    assert set(NUMBERS) == {*LOWEST, *RANGES}


@pytest.mark.parametrize("name", LOWEST)
def test_lowest_whole_numbers(name: str) -> None:
    low = LOWEST[name]
    assert getattr(Settings(**{name: low}, **NEEDS.get(name, {})), name) == low
    with pytest.raises(
        InputError,
        match=f"^{name} must be (at least|from) {low}(?: (and below|to) .*)?, got {low - 1}$",
    ):
        Settings(**{name: low - 1})


@pytest.mark.parametrize("name", RANGES)
def test_ranges(name: str) -> None:
    good, bad = RANGES[name]
    for value in good:
        assert getattr(Settings(**{name: value}, **NEEDS.get(name, {})), name) == value
    for value in bad:
        with pytest.raises(InputError, match=rf"^{name} must be .*got {re.escape(str(value))}"):
            Settings(**{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", FLOATS)
def test_numbers_are_finite(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"^{name} must be a finite number, got"):
        Settings(**{name: value})


@pytest.mark.parametrize("name", FIELDS)
def test_types(name: str) -> None:
    for value in WRONG_TYPE[KINDS[name]]:
        got = re.escape(repr(value))
        with pytest.raises(InputError, match=f"^{name} must be (a|true) .*, got {got}$"):
            Settings(**{name: value})


def test_whole_numbers_pass_as_floats() -> None:
    settings = Settings(lr=1, clip_norm=5)
    assert (type(settings.lr), type(settings.clip_norm)) == (float, float)


@pytest.mark.parametrize("name", TEXTS)
def test_an_empty_text_is_refused(name: str) -> None:
    """`flambeau train "$DATA"` with no DATA set must not train on the current folder."""
    with pytest.raises(InputError, match=name):
        Settings(**{name: ""})


def test_a_path_must_be_utf8() -> None:
    """A file name of other bytes, as the command line hands it over, cannot be written to config.toml."""
    with pytest.raises(InputError, match=r"^data must be UTF-8, got 'caf\\udce9'; rename it$"):
        Settings(data=os.fsdecode(b"caf\xe9"))
    assert Settings(data="café").data == "café"


@pytest.mark.parametrize("name", [n for n, f in FIELDS.items() if f.default is not None])
def test_only_what_is_chosen_from_the_data_may_be_none(name: str) -> None:
    with pytest.raises(InputError, match=f"^{name} needs a value$"):
        Settings(**{name: None})


@pytest.mark.parametrize("name", [n for n, f in FIELDS.items() if f.metadata["choices"]])
def test_choices(name: str) -> None:
    choices = FIELDS[name].metadata["choices"]
    for choice in choices:
        Settings(**{name: choice}, **NEEDS.get(name, {}))
    wrong = choices[0] + "x"
    with pytest.raises(
        InputError, match=rf"^{name} must be one of .*{wrong}'; did you mean '{choices[0]}'\?$"
    ):
        Settings(**{name: wrong})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fixed_norm": True}, "fixed_norm has an effect only with optimizer = 'muon'"),
        ({"muon_others": "sgd"}, "muon_others has an effect only with optimizer = 'muon'"),
        (
            {"optimizer": "muon", "fixed_norm": True, "lr": 0.2},
            "fixed_norm needs lr, .* muon_others_lr",
        ),
        ({"flip": False, "alternate_flip": True}, "alternate_flip has no effect without flip"),
        ({"epochs": 3, "duration": "3ep"}, "epochs = 3 and duration = '3ep' contradict"),
        ({"pretrained": True, "model": "small_convnet"}, "no published weights of small_convnet"),
        (
            {"pretrained": True, "model": "speedrun_convnet_wide"},
            "weights of speedrun_convnet_wide",
        ),
        ({"pretrained": True, "model": "net.py:f"}, "no published weights of net.py:f"),
        ({"duration": "8st", "warmup": "8st"}, "warmup = '8st' is not shorter than duration"),
        ({"duration": "2ep", "warmup": "2.5ep"}, "warmup = '2.5ep' is not shorter than duration"),
        ({"warmup": "100%"}, "warmup = '100%' leaves nothing"),
        ({"duration": "0st"}, "duration must be above 0, got '0st'"),
        ({"checkpoint_every": "0ep"}, "checkpoint_every must be above 0, got '0ep'"),
        ({"duration": "5%"}, "duration must be a duration such as '10ep'"),
        ({"checkpoint_every": "5%"}, "checkpoint_every must be a duration such as '10ep'"),
        ({"duration": "90"}, "duration must be a duration such as .* got '90'"),
        ({"duration": "90 epochs"}, "duration must be a duration"),
        ({"duration": "-1ep"}, "duration must be a duration"),
        ({"warmup": "101%"}, "at most 100%"),
        ({"warmup": "1.5st"}, "steps are whole numbers"),
    ],
)
def test_contradictions_and_lengths(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(**settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90ep", "90ep"), ("2.50ep", "2.5ep"), ("007st", "7st"), ("5%", "5%"), (" 3ep ", "3ep"),
        ("1000000st", "1000000st"), ("12345678st", "12345678st"), ("0.00001ep", "0.00001ep"),
        ("100000000000000000000ep", "100000000000000000000ep"),
    ],
)  # fmt: skip
def test_a_duration_is_written_as_it_can_be_read(text: str, expected: str) -> None:
    duration = parse_duration(text, name="warmup", units="% ep st")
    assert str(duration) == expected
    assert parse_duration(expected, name="warmup", units="% ep st") == duration


def test_durations_in_steps() -> None:
    assert parse_duration("2.5ep", name="d").steps(steps_per_epoch=11) == 28  # 27.5, to even
    assert parse_duration("7st", name="d").steps(steps_per_epoch=11) == 7
    percent = parse_duration("5%", name="w", units="%")
    assert percent.steps(steps_per_epoch=11, total_steps=1000) == 50


def test_one_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = Settings(data="x/../photos", epochs=3, model="net.py:make", warmup=" 2.0ep ")
    settings = canonical(told)
    assert settings.data == str(tmp_path / "photos")
    assert settings.model == f"{tmp_path}/net.py:make"
    assert (settings.epochs, settings.duration, settings.warmup) == (None, "3ep", "2ep")
    assert canonical(settings) == settings
    assert canonical(Settings(duration="3ep")).duration == "3ep"
    assert canonical(Settings(model="resnet18")).model == "resnet18"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    settings = canonical(Settings(data=str(tmp_path), lr=0.1, ema=0.999, epochs=2, flip=False))
    path = write(tmp_path, as_toml(values_of(settings)).decode())
    assert tomllib.loads(path.read_text(encoding="utf-8")) == values_of(settings)
    assert Settings(**read_config(path)) == settings


def test_settings_of_a_run_are_read_as_they_were_resolved(tmp_path: Path) -> None:
    open_ones = {"image_size": 8, "workers": 0, "model": "small_convnet", "duration": "2ep"}
    resolved = ResolvedSettings(**open_ones, batch_size=4, lr=0.1)
    path = write(tmp_path, as_toml(values_of(resolved)).decode())
    assert from_stored(read_config(path), path) == resolved
    with pytest.raises(InputError, match="says no batch_size"):
        from_stored(
            {name: v for name, v in values_of(resolved).items() if name != "batch_size"}, path
        )
    with pytest.raises(InputError, match="lr needs a value"):
        ResolvedSettings(**open_ones, batch_size=4, lr=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate = 0.1", "my.toml: unknown key 'learning_rate'"),
        ("btach_size = 3", r"my.toml: unknown key 'btach_size'; did you mean 'batch_size'\?"),
        ("batch-size = 3", r"my.toml: unknown key 'batch-size'; did you mean 'batch_size'\?"),
        ("lr = ", "my.toml cannot be read as TOML"),
        ("lr = 1\nlr = 2", "my.toml cannot be read as TOML"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_config(write(tmp_path, text))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--config .*gone\.toml: no such file"):
        read_config(tmp_path / "gone.toml")
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path)
    binary = tmp_path / "model.safetensors"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        read_config(binary)


def test_a_stored_key_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"config\.toml: unknown key 'ema_decay'.*\nThe file was edited, or"
    ):
        from_stored({"ema_decay": 0.9}, tmp_path / "config.toml")


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    path = write(tmp_path, "model = \"__import__('os').system('touch pwned')\"")
    assert Settings(**read_config(path)).model == "__import__('os').system('touch pwned')"


def test_differences_leave_out_what_a_resume_may_change() -> None:
    stored = values_of(Settings(lr=0.1, duration="3ep"))
    neutral = {
        "workers": 2,
        "keep": 5,
        "checkpoint_every": "9st",
        "data": "x",
        "skip_bad_images": 3,
        "stall_timeout": 5.0,
        "verify_steps": "1/100",
        "download": True,
        "shard": "fsdp",
        "on_nan": "rollback",
        "recompute": "layer*.*",
        "extend": "2ep",
        "compile": "default",
        "retry_workers": 2,
        "stop_within": "30s",
        "mirror": "s3://bucket/runs/a",
        "track": "tensorboard,csv",
        "cache": "other",
        "cache_size": "9GB",
    }
    assert differences(stored, Identity({**stored, **neutral}, FIELDS)) == []
    assert {n for n, f in FIELDS.items() if f.metadata["may_change"]} == set(neutral)
    changed = {**stored, "lr": 0.2, "mixup": 0.1}
    assert differences(stored, Identity(changed, FIELDS)) == [
        "lr: 0.1 there, 0.2 now",
        "mixup: 0.0 there, 0.1 now",
    ]
    assert differences({}, Identity({"lr": 0.1}, FIELDS)) == ["lr: not given there, 0.1 now"]
    assert differences({"flip": True}, Identity({"flip": False}, FIELDS)) == [
        "flip: yes there, no now"
    ]
    assert (
        differences({"lr": 0.1}, Identity({"lr": 0.1, "freeze": "none"}, FIELDS)) == []
    )  # which an older version lacked
    assert differences({"mine": 1}, Identity({"mine": 2}, FIELDS)) == ["mine: 1 there, 2 now"]


def test_nearest() -> None:
    assert nearest("batchsize", FIELDS) == "; did you mean 'batch_size'?"
    assert nearest("AdamW", ("sgd", "adam", "adamw")) == "; did you mean 'adamw'?"
    assert nearest("ADAMW", ("sgd", "Adam", "AdamW")) == "; did you mean 'AdamW'?"
    models = ("efficientnet_l2", "efficientnet_b0", "efficientnetv2_m", "efficientformer_l1")
    assert nearest("efficientnet", models) == "; did you mean 'efficientnet_b0'?"
    assert nearest("zz", models) == ""
    assert nearest("--outt", ["--out", "--json"]) == "; did you mean '--out'?"
    assert nearest("--lrr", ["--lr", "--zh"]) == "; did you mean '--lr'?"
    for far in ("--bogus", "--version", "--zzz"):
        assert nearest(far, ["-o", "--out", "--json", "--zh"]) == ""
    assert nearest("extra", ["train", "verify"]) == ""
    assert nearest("amadw", ["sgd", "adam", "adamw"]) == "; did you mean 'adamw'?"
    assert nearest("trian", ["train", "verify"]) == "; did you mean 'train'?"
    assert nearest("qqqqqq", FIELDS) == ""


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().lr = 0.1  # type: ignore[misc]


def test_compression_is_not_for_sharded_weights() -> None:
    with pytest.raises(InputError, match="compression = 'fp16' has no effect with shard = 'fsdp'"):
        Settings(shard="fsdp", compression="fp16")
