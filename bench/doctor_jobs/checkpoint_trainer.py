"""The Trainer of transformers saves model and optimizer after every second step, as its first trial did."""

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

import job

CAUSE = "checkpoint"
WHERE = None
REMEDY = None
TRAINER = "transformers"


class TaggerConfig(PretrainedConfig):
    model_type = "tagger"

    def __init__(self, words: int = 2000, width: int = 128, tags: int = 8, **kwargs) -> None:
        self.words, self.width, self.tags = words, width, tags
        super().__init__(**kwargs)


class Tagger(PreTrainedModel):
    config_class = TaggerConfig

    def __init__(self, config: TaggerConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.words, config.width)
        self.mix = nn.Conv1d(config.width, config.width, 3, padding=1)
        self.head = nn.Linear(config.width, config.tags)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        mixed = self.mix(self.embedding(input_ids).transpose(1, 2)).relu().transpose(1, 2)
        logits = self.head(mixed)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def main() -> None:
    told = job.begin(REMEDY, every=2)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2000, (2000, 24))
    data = [{"input_ids": row, "labels": row % 8} for row in words]
    args = TrainingArguments(
        output_dir=f"{job.CACHE / 'tagger'}",
        num_train_epochs=100,
        per_device_train_batch_size=8,
        save_strategy="steps",
        save_steps=1000 if told.remedied else 2,
        save_total_limit=1,
        logging_steps=500,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model=Tagger(TaggerConfig()), args=args, train_dataset=data).train()


if __name__ == "__main__":
    main()
