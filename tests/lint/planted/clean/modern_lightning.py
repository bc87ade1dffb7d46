import lightning as L
import torch
from torch import nn


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 2)
        self.outs = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.outs.append(loss)
        return loss

    def on_validation_epoch_end(self):
        self.log("val", torch.stack(self.outs).mean())
        self.outs.clear()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = L.Trainer(accelerator="gpu", devices=2, max_epochs=3)
