# planted: line 16, validation_epoch_end was removed; use on_validation_epoch_end; since Lightning 2.0
import torch
from pytorch_lightning import LightningModule


class Segmenter(LightningModule):
    def __init__(self, net, metric):
        super().__init__()
        self.net = net
        self.metric = metric

    def validation_step(self, batch, idx):
        image, mask = batch
        return self.metric(self.net(image), mask)

    def validation_epoch_end(self, outs):
        self.log("val_iou", torch.stack(outs).mean(), prog_bar=True)
