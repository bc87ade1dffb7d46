import torch
import torch.nn.functional as F
import pytorch_lightning as pl

class Lit(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"val_loss": F.cross_entropy(self.net(x), y)}

    def validation_epoch_end(self, outputs):
        self.log("val_loss", torch.stack([o["val_loss"] for o in outputs]).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)
