"""Ragged point clouds are joined by a tensor that grows with each of them. Lightning."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import job

CAUSE = "collate"
WHERE = "points = torch.cat([points, cloud])"
REMEDY = None
TRAINER = "lightning"


def grown(clouds):
    points = torch.empty(0, 3)
    for cloud in clouds:
        points = torch.cat([points, cloud])
    return points


def joined(clouds):
    return torch.cat(clouds)


class PointNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def training_step(self, batch, batch_idx):
        points, lengths, labels = batch
        per_point = self.net(points[::8])
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[::8]
        pooled = per_point.new_zeros(len(lengths), 16).index_add(0, owner, per_point)
        return F.cross_entropy(self.head(pooled), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class PointClouds(L.LightningDataModule):
    def __init__(self, join):
        super().__init__()
        self.join = join

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(0)
        counts = torch.randint(200, 500, (2000,), generator=generator).tolist()
        self.samples = [(torch.randn(n, 3), number % 4) for number, n in enumerate(counts)]

    def collate(self, samples):
        clouds = [cloud for cloud, _ in samples]
        lengths = torch.tensor([len(cloud) for cloud in clouds])
        return self.join(clouds), lengths, torch.tensor([label for _, label in samples])

    def train_dataloader(self):
        samples = job.Repeated(self.samples, 20)
        return DataLoader(samples, batch_size=200, shuffle=True, collate_fn=self.collate)


if __name__ == "__main__":
    told = job.begin(REMEDY)
    torch.set_num_threads(1)
    L.seed_everything(0)
    trainer = L.Trainer(
        max_epochs=-1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(PointNet(), datamodule=PointClouds(joined if told.remedied else grown))
