import torch
import pytorch_lightning as pl
from pytorch_lightning.metrics import Accuracy
from torch.nn import functional as F

class Mnist(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.l1 = torch.nn.Linear(28 * 28, 10)
        self.acc = Accuracy()

    def training_step(self, batch, _):
        x, y = batch
        logits = self.l1(x.flatten(1))
        self.log("acc", self.acc(logits.softmax(-1), y))
        return F.cross_entropy(logits, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
