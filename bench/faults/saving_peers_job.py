"""What saving_peers.py trains: a small model, saved every third step and continued as each library documents.

    python saving_peers_job.py WAY

PEERS_STOP is a step in which the process ends at once. It says where it goes on, which saves have returned,
and in the end a hash of the weights.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

OUT = Path("out")
EVERY = 3
LAST = 12
STOP = int(os.environ.get("PEERS_STOP", "-1"))
BATCH = 16


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def samples() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    count = BATCH * 12
    return torch.randn(count, 32, generator=numbers), torch.randint(4, (count,), generator=numbers)


INPUTS, TARGETS = samples()


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Of the batch of a step."""
    batch = slice(BATCH * step, BATCH * (step + 1))
    return cross_entropy(model(INPUTS[batch]), TARGETS[batch])


def stop_at(step: int) -> None:
    if step == STOP:
        os._exit(9)


def say(*words: object) -> None:
    print(*words, flush=True)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, start: int, save: Callable[[int], object]
) -> None:
    """A loop that saves, from a step on."""
    say("RESUMED", start)
    for step in range(start, LAST):
        stop_at(step)
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            save(step + 1)
            say("SAVED", step + 1)
    end(model)


def end(model: nn.Module) -> None:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().numpy().tobytes())
    say("END", digest.hexdigest())


# ------------------------------------------------------------------ the ways


def torch_save(name: Callable[[int], str]) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    OUT.mkdir(exist_ok=True)
    found = sorted(OUT.glob("*.pt"))
    start = 0
    if found:
        state = torch.load(found[-1], weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]

    def save(step: int) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, OUT / name(step))

    train(model, optimizer, start, save)


def dcp() -> None:
    """Each save in a folder of its own; the newest that has its metadata, which are written last."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = make_model()
    optimizer = make_optimizer(model)
    found = sorted(path for path in OUT.glob("step-*") if (path / ".metadata").exists())

    def state(step: int) -> dict[str, Any]:
        weights, state = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": state, "step": torch.tensor(step)}

    start = 0
    if found:
        read = state(0)
        dcp.load(read, checkpoint_id=found[-1])
        set_state_dict(
            model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"]
        )
        start = int(read["step"])
    train(
        model,
        optimizer,
        start,
        lambda step: dcp.save(state(step), checkpoint_id=OUT / f"step-{step:04}"),
    )


def lightning() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, _: Any) -> Tensor:
            stop_at(self.global_step)
            return loss_of(self.model, self.global_step)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.model)

        def on_train_start(self) -> None:
            say("RESUMED", self.global_step)

    class Saves(ModelCheckpoint):
        def _save_last_checkpoint(self, trainer: Any, monitored: Any) -> None:
            super()._save_last_checkpoint(trainer, monitored)
            say("SAVED", trainer.global_step)

    module = Module()
    saves = Saves(OUT, every_n_train_steps=EVERY, save_top_k=-1, save_last=True)
    trainer = pl.Trainer(
        max_steps=LAST, max_epochs=-1, accelerator="cpu", devices=1, callbacks=[saves], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    steps = torch.utils.data.DataLoader(TensorDataset(torch.zeros(LAST)))
    trainer.fit(module, steps, ckpt_path="last")
    end(module.model)


def accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    class Progress:
        step = 0

        def state_dict(self) -> dict[str, int]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.step = state["step"]

    found = list((OUT / "checkpoints").glob("checkpoint_*"))
    project = ProjectConfiguration(f"{OUT}", automatic_checkpoint_naming=True, total_limit=3)
    project.iteration = max((int(path.name[11:]) + 1 for path in found), default=0)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = make_model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if found:
        accelerator.load_state()

    def save(step: int) -> None:
        progress.step = step
        accelerator.save_state()

    train(model, optimizer, progress.step, save)


class Samples(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": INPUTS[index], "labels": TARGETS[index]}


def transformers() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            outputs = self.model(inputs)
            return {"loss": cross_entropy(outputs, labels), "logits": outputs}

    class Says(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            say("RESUMED", state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            stop_at(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            say("SAVED", state.global_step)

    settings = TrainingArguments(
        f"{OUT}", max_steps=LAST, save_steps=EVERY, per_device_train_batch_size=BATCH, use_cpu=True,
        report_to="none", disable_tqdm=True, learning_rate=0.01, logging_strategy="no", save_total_limit=3,
    )  # fmt: skip
    model = Model()
    trainer = Trainer(model, settings, train_dataset=Samples(), callbacks=[Says()])
    last = get_last_checkpoint(f"{OUT}") if OUT.exists() else None
    trainer.train(resume_from_checkpoint=last)
    end(model.model)


def flambeau() -> None:
    from flambeau import Run

    model = make_model()
    run = Run(
        f"{OUT}", model, make_optimizer(model), TensorDataset(INPUTS, TARGETS), batch_size=BATCH,
        duration=f"{LAST}st", checkpoint_every=f"{EVERY}st", keep=3,
    )  # fmt: skip
    say("RESUMED", run.state.step)
    for _ in run.epochs():
        for inputs, targets in run.batches():
            stop_at(run.state.step)
            run.step(cross_entropy(model(inputs), targets))
    end(model)


WAYS: dict[str, Callable[[], None]] = {
    "torch.save, one file": lambda: torch_save(lambda step: "checkpoint.pt"),
    "torch.save, a file each": lambda: torch_save(lambda step: f"step-{step:04}.pt"),
    "DCP": dcp,
    "Lightning": lightning,
    "Accelerate": accelerate,
    "HF Trainer": transformers,
    "flambeau": flambeau,
}


if __name__ == "__main__":
    WAYS[sys.argv[1]]()
