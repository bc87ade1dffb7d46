"""A callback sorts the losses of all samples in each step, to know the hardest. transformers' Trainer."""

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import job

CAUSE = "python"
WHERE = "ranking = sorted(self.losses, key=self.losses.get, reverse=True)"
REMEDY = None
TRAINER = "transformers"


class Hardest(TrainerCallback):
    def __init__(self, samples: int) -> None:
        draws = random.Random(0)
        self.losses = {number: draws.random() for number in range(samples)}
        self.hardest: list[int] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.losses[state.global_step % len(self.losses)] = random.random()
        ranking = sorted(self.losses, key=self.losses.get, reverse=True)
        self.hardest = ranking[:100]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    told = job.begin(REMEDY)
    data = [{"x": torch.randn(48), "labels": number % 3} for number in range(10_000)]
    arguments = TrainingArguments(
        output_dir=f"{job.CACHE / 'transformers'}",
        num_train_epochs=500,
        per_device_train_batch_size=32,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [] if told.remedied else [Hardest(20_000)]
    Trainer(Net(), arguments, train_dataset=data, callbacks=callbacks).train()


if __name__ == "__main__":
    main()
