"""Ways of saving by packages: checkpoints, tables, data bases, trackers, trainers."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

Save = Callable[[int], None]


def safetensors_file(model: nn.Module) -> Save:
    from safetensors.torch import load_file, save_file

    def save(step: int) -> None:
        save_file({"step": torch.tensor([step])}, "last.safetensors")
        assert load_file("last.safetensors")["step"].item() == step

    return save


def distributed_checkpoint(model: nn.Module) -> Save:
    import torch.distributed.checkpoint as dcp

    def save(step: int) -> None:
        dcp.save({"step": torch.tensor([step])}, checkpoint_id="dcp", no_dist=True)
        found = {"step": torch.zeros(1, dtype=torch.int64)}
        dcp.load(found, checkpoint_id="dcp", no_dist=True)
        assert found["step"].item() == step

    return save


def joblib_file(model: nn.Module) -> Save:
    import joblib

    def save(step: int) -> None:
        joblib.dump({"step": step}, "last.joblib")
        assert joblib.load("last.joblib")["step"] == step

    return save


def sqlite(model: nn.Module) -> Save:
    return _sqlite("a.db")


def sqlite_wal(model: nn.Module) -> Save:
    return _sqlite("wal.db")


def _sqlite(name: str) -> Save:
    base = sqlite3.connect(name)

    def save(step: int) -> None:
        base.execute("insert into steps values (?)", (step,))
        base.commit()
        with sqlite3.connect(name) as other:
            assert other.execute("select max(step) from steps").fetchone()[0] >= step
        other.close()

    return save


def prepare_sqlite() -> None:
    _prepare_sqlite("a.db", "delete")


def prepare_sqlite_wal() -> None:
    _prepare_sqlite("wal.db", "wal")


def _prepare_sqlite(name: str, mode: str) -> None:
    base = sqlite3.connect(name)
    base.execute(f"pragma journal_mode={mode}")
    base.execute("create table steps (step integer)")
    base.execute("insert into steps values (-1)")
    base.commit()
    if mode == "wal":
        os._exit(0)  # so that its log stays beside it


def lmdb_base(model: nn.Module) -> Save:
    import lmdb

    base = lmdb.open("base.lmdb", map_size=2**24)

    def save(step: int) -> None:
        with base.begin(write=True) as change:
            change.put(b"step", b"%d" % step)
        with base.begin() as look:
            assert look.get(b"step") == b"%d" % step

    return save


def prepare_lmdb() -> None:
    import lmdb

    with lmdb.open("base.lmdb", map_size=2**24) as base, base.begin(write=True) as change:
        change.put(b"mine", b"1")


def hdf5(model: nn.Module) -> Save:
    import h5py

    def save(step: int) -> None:
        with h5py.File("rows.h5", "a") as file:
            file["steps"].resize((len(file["steps"]) + 1,))
            file["steps"][-1] = step
        with h5py.File("rows.h5") as file:
            assert file["steps"][-1] == step

    return save


def prepare_hdf5() -> None:
    import h5py

    with h5py.File("rows.h5", "w") as file:
        file.create_dataset("steps", (1,), maxshape=(None,), dtype="i8")


def zarr_array(model: nn.Module) -> Save:
    import zarr

    array = zarr.open_array("rows.zarr", mode="r+")

    def save(step: int) -> None:
        array[:] = step
        assert zarr.open_array("rows.zarr", mode="r")[0] == step

    return save


def prepare_zarr() -> None:
    import zarr

    zarr.create_array("rows.zarr", shape=(8,), chunks=(4,), dtype="i8")[:] = 1


def wandb_offline(model: nn.Module) -> Save:
    import wandb

    run = wandb.init(project="mine", mode="offline", settings=wandb.Settings(silent=True))

    def save(step: int) -> None:
        run.log({"step": step})
        assert list(Path("wandb").glob("offline-run-*"))

    return save


def wandb_as_the_environment_says(model: nn.Module) -> Save:
    """Nobody is logged in and no server answers: what is written is what it leaves in the folder."""
    import wandb

    try:
        wandb.init(project="mine", settings=wandb.Settings(silent=True, init_timeout=3))
    except Exception as error:  # of several kinds
        print(f"W&B does without: {type(error).__name__}")

    def save(step: int) -> None:
        Path("wandb").mkdir(exist_ok=True)
        Path("wandb/steps.txt").write_text(f"{step}")
        assert Path("wandb/steps.txt").read_text() == f"{step}"

    return save


def tensorboard(model: nn.Module) -> Save:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter("tb")

    def save(step: int) -> None:
        writer.add_scalar("loss", 1.0, step)
        writer.flush()
        assert any(file.stat().st_size > 80 for file in Path("tb").glob("events*"))

    return save


def mlflow_files(model: nn.Module) -> Save:
    import mlflow

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    mlflow.set_tracking_uri(Path("mlruns").absolute().as_uri())
    mlflow.set_experiment("mine")
    mlflow.start_run()

    def save(step: int) -> None:
        mlflow.log_metric("loss", 0.5, step=step)
        assert list(Path("mlruns").rglob("metrics/loss"))

    return save


def lightning_checkpoint(model: nn.Module) -> Save:
    """Its Trainer runs the training; the loop around it does not get to a step."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.inner(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step > 1 and self.global_step % 20 == 0:
                assert list(Path("lightning").rglob("*.ckpt"))

    keep = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath="lightning",
        filename="{step}",
        every_n_train_steps=5,
        save_top_k=2,
        monitor="step",
        mode="max",
        save_last=True,
    )
    trainer = lightning.Trainer(
        max_steps=_steps(),
        max_epochs=-1,
        accelerator="cpu",
        callbacks=[keep],
        enable_progress_bar=False,
        default_root_dir="lightning",
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(_data(), 16))
    return lambda step: None


def huggingface_trainer(model: nn.Module) -> Save:
    from transformers import Trainer, TrainingArguments

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.inner(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    x, y = _data().tensors
    rows = [{"x": one, "labels": label} for one, label in zip(x, y, strict=True)]
    arguments = TrainingArguments(
        "hf",
        max_steps=_steps(),
        save_steps=5,
        save_total_limit=2,
        per_device_train_batch_size=16,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=5,
    )
    Trainer(Classifier(), arguments, train_dataset=rows).train()  # type: ignore[arg-type]
    return lambda step: None


def accelerate_state(model: nn.Module) -> Save:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    config = ProjectConfiguration("acc", automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=config)
    prepared = accelerator.prepare(nn.Linear(2, 2))

    def save(step: int) -> None:
        accelerator.save_state()
        assert len(list(Path("acc/checkpoints").iterdir())) <= 2
        assert prepared is not None

    return save


def prepare_numbered() -> None:
    """What a rotation finds of an earlier training."""
    for folder in ("hf/checkpoint-1", "hf/checkpoint-2", "acc/checkpoints/checkpoint_100000"):
        Path(folder).mkdir(parents=True)
        Path(folder, "mine.bin").write_bytes(b"the user's own")


def csv_of_pandas(model: nn.Module) -> Save:
    """A table that is read, gets a row, and is written anew, as pandas' users do."""

    def save(step: int) -> None:
        rows = np.loadtxt("rows.txt", ndmin=1)
        np.savetxt("rows.txt", np.append(rows, step))
        shutil.move("rows.txt", "rows.moved")
        shutil.move("rows.moved", "rows.txt")
        assert np.loadtxt("rows.txt", ndmin=1)[-1] == step

    return save


def prepare_rows() -> None:
    np.savetxt("rows.txt", np.arange(4.0))


def _data() -> TensorDataset:
    return TensorDataset(torch.randn(640, 32), torch.randint(4, (640,)))


def _steps() -> int:
    return int(os.environ.get("SAVING_STEPS", "1000000000"))


WAYS: dict[str, dict[str, Any]] = {
    "safetensors_file": {
        "start": safetensors_file,
        "files": ("last.safetensors",),
        "needs": ("safetensors",),
    },
    "distributed_checkpoint": {
        "start": distributed_checkpoint,
        "files": ("dcp/.metadata", "dcp/__0_0.distcp"),
    },
    "joblib_file": {"start": joblib_file, "files": ("last.joblib",), "needs": ("joblib",)},
    "sqlite": {"start": sqlite, "prepare": prepare_sqlite},
    "sqlite_wal": {"start": sqlite_wal, "prepare": prepare_sqlite_wal},
    "lmdb_base": {"start": lmdb_base, "prepare": prepare_lmdb, "needs": ("lmdb",)},
    "hdf5": {"start": hdf5, "prepare": prepare_hdf5, "needs": ("h5py",)},
    "zarr_array": {"start": zarr_array, "prepare": prepare_zarr, "needs": ("zarr",)},
    "wandb_offline": {"start": wandb_offline, "files": ("wandb/mine.txt",), "needs": ("wandb",)},
    "wandb_online": {
        "start": wandb_as_the_environment_says,
        "files": ("wandb/steps.txt",),
        "needs": ("wandb",),
    },
    "tensorboard": {"start": tensorboard, "files": ("tb/mine.txt",), "needs": ("tensorboard",)},
    "mlflow_files": {"start": mlflow_files, "files": ("mlruns/mine.txt",), "needs": ("mlflow",)},
    "lightning_checkpoint": {
        "start": lightning_checkpoint,
        "files": ("lightning/last.ckpt",),
        "needs": ("lightning",),
    },
    "huggingface_trainer": {
        "start": huggingface_trainer,
        "prepare": prepare_numbered,
        "needs": ("transformers", "accelerate"),
    },
    "accelerate_state": {
        "start": accelerate_state,
        "prepare": prepare_numbered,
        "needs": ("accelerate",),
    },
    "table_anew": {"start": csv_of_pandas, "prepare": prepare_rows},
}
"""By name: what `Way` takes."""
