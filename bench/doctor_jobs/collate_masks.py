"""A collator that builds causal masks out of Python lists. The Trainer of transformers."""

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import job

CAUSE = "collate"
WHERE = "masks = [torch.tensor([[j <= i < n for j in span] for i in span]) for n in lengths]"
REMEDY = "cached batches"
TRAINER = "transformers"

WORDS = 200


def collate(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    texts = [sample["input_ids"] for sample in samples]
    lengths = [len(ids) for ids in texts]
    span = range(max(lengths))
    masks = [torch.tensor([[j <= i < n for j in span] for i in span]) for n in lengths]
    padded = [ids + [0] * (len(span) - len(ids)) for ids in texts]
    return {"input_ids": torch.tensor(padded), "masks": torch.stack(masks)}


class LanguageModel(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.mixing = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: Tensor, masks: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        query, key, value = self.mixing(x).chunk(3, dim=-1)
        diagonal = torch.eye(masks.shape[1], dtype=torch.bool)  # a padded word sees itself
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=masks | diagonal)
        logits = self.head(x + mixed)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class CachedTrainer(Trainer):
    def get_train_dataloader(self) -> DataLoader:
        return job.Cached(super().get_train_dataloader())


def main() -> None:
    told = job.begin(REMEDY)
    torch.set_num_threads(1)  # the cores are for the workers
    draws = random.Random(0)
    texts = [
        {"input_ids": draws.choices(range(WORDS), k=draws.randint(100, 180))} for _ in range(4000)
    ]
    arguments = TrainingArguments(
        output_dir=f"{job.CACHE / 'transformers'}",
        num_train_epochs=100,
        per_device_train_batch_size=16,
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = CachedTrainer if told.remedied else Trainer
    trainer(LanguageModel(), arguments, train_dataset=texts, data_collator=collate).train()


if __name__ == "__main__":
    main()
