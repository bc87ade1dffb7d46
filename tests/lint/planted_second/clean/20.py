import torch
import lightning as L
import torch.nn.functional as F

class Lit(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.losses.append(F.cross_entropy(self.net(x), y))

    def on_validation_epoch_end(self):
        self.log("val_loss", torch.stack(self.losses).mean())
        self.losses.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)
