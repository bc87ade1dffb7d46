# planted: line 3, timm.models.registry is deprecated; use timm.models; since timm 0.9
import torch.nn as nn
from timm.models.registry import register_model


class TinyNet(nn.Module):
    def __init__(self, num_classes=1000):
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, x):
        return self.head(x.mean((2, 3)))


@register_model
def tinynet(pretrained=False, **kwargs):
    return TinyNet(num_classes=kwargs.get("num_classes", 1000))
