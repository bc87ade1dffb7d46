"""Unfused AdamW of eight million parameters, in a model that computes little. The Trainer of transformers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import job
from flambeau.recipes.setup.freed_memory import keep_freed_memory

CAUSE = "optimizer"
WHERE = None
REMEDY = "fused optimizer"
TRAINER = "transformers"

WORDS = 30_000


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(WORDS, 256)
        self.head = nn.Linear(256, 4)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    told = job.begin(REMEDY)
    # Gradients of 30 MB: whether the C library gives them back in each step is chance, and another cause.
    keep_freed_memory()
    words, labels = torch.randint(0, WORDS, (20_000, 32)), torch.randint(0, 4, (20_000,)).tolist()
    texts = [{"input_ids": ids, "labels": y} for ids, y in zip(words, labels, strict=True)]
    arguments = TrainingArguments(
        output_dir=f"{job.CACHE / 'transformers'}",
        num_train_epochs=100,
        per_device_train_batch_size=16,
        optim="adamw_torch_fused" if told.remedied else "adamw_torch",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    Trainer(BagOfWords(), arguments, train_dataset=texts).train()


if __name__ == "__main__":
    main()
