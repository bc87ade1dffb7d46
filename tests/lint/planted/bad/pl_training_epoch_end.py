# planted: line 18, training_epoch_end was removed; use on_train_epoch_end; since Lightning 2.0
import pytorch_lightning as pl
import torch
import torch.nn.functional as F


class LitAE(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = F.mse_loss(self.net(x), x)
        self.log("loss", loss)
        return {"loss": loss}

    def training_epoch_end(self, outputs):
        avg = torch.stack([o["loss"] for o in outputs]).mean()
        self.log("avg_loss", avg)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)
