# planted: line 12, training_step(optimizer_idx) was removed: manual optimization; since Lightning 2.0
import pytorch_lightning as pl
import torch


class GAN(pl.LightningModule):
    def __init__(self, g, d):
        super().__init__()
        self.g = g
        self.d = d

    def training_step(self, batch, batch_idx, optimizer_idx):
        x, _ = batch
        z = torch.randn(x.size(0), 100, device=self.device)
        if optimizer_idx == 0:
            return -self.d(self.g(z)).mean()
        return self.d(self.g(z).detach()).mean() - self.d(x).mean()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.g.parameters()), torch.optim.Adam(self.d.parameters())], []
