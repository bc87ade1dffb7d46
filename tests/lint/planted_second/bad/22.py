import torch
import pytorch_lightning as pl

class GAN(pl.LightningModule):
    def __init__(self, g, d):
        super().__init__()
        self.g = g
        self.d = d

    def training_step(self, batch, batch_idx, optimizer_idx):
        z = torch.randn(batch.size(0), 100, device=self.device)
        if optimizer_idx == 0:
            return -self.d(self.g(z)).mean()
        return self.d(self.g(z).detach()).mean() - self.d(batch).mean()

    def configure_optimizers(self):
        og = torch.optim.Adam(self.g.parameters(), lr=2e-4)
        od = torch.optim.Adam(self.d.parameters(), lr=2e-4)
        return [og, od], []
