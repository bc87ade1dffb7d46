"""Images are made small by PIL within the training step. Lightning."""

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader

import job

CAUSE = "python"
WHERE = "small = [image.resize((32, 32), Image.Resampling.LANCZOS) for image in images]"
REMEDY = None
TRAINER = "lightning"


def keep(samples):
    return list(zip(*samples, strict=True))


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = job.small_convnet()

    def to_tensor(self, images):
        if images[0].size == (32, 32):
            small = images
        else:
            small = [image.resize((32, 32), Image.Resampling.LANCZOS) for image in images]
        return torch.stack([torch.from_numpy(np.array(image)) for image in small])

    def training_step(self, batch, batch_idx):
        images, labels = batch
        x = self.to_tensor(images).permute(0, 3, 1, 2).float() / 255
        loss = F.cross_entropy(self.net(x), torch.tensor(labels))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    told = job.begin(REMEDY)
    size = 32 if told.remedied else 256
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (size, size, 3), np.uint8)) for _ in range(200)]
    data = job.Repeated([(image, i % 10) for i, image in enumerate(images)], 20)
    loader = DataLoader(data, batch_size=16, shuffle=True, collate_fn=keep)
    trainer = L.Trainer(
        max_epochs=500,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), loader)


if __name__ == "__main__":
    main()
