# planted: line 4, pytorch_lightning.metrics was removed; use torchmetrics; since Lightning 1.5
import pytorch_lightning as pl
import torch.nn.functional as F
from pytorch_lightning.metrics import Accuracy


class Lit(pl.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.acc = Accuracy()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.model(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.log("val_acc", self.acc(logits.softmax(-1), y))
