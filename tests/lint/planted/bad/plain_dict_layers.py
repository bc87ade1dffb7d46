# planted: line 9, layers in a plain dict are not registered; use nn.ModuleDict; in all versions
import torch.nn as nn


class MultiTask(nn.Module):
    def __init__(self, backbone, width):
        super().__init__()
        self.backbone = backbone
        self.heads = {
            "age": nn.Linear(width, 1),
            "gender": nn.Linear(width, 2),
        }

    def forward(self, x):
        feats = self.backbone(x)
        return {name: head(feats) for name, head in self.heads.items()}
