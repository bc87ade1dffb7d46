import torch.nn as nn
from timm.models.registry import register_model

class TinyNet(nn.Module):
    def __init__(self, num_classes=1000):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, stride=4)
        self.head = nn.Linear(32, num_classes)

    def forward(self, x):
        return self.head(self.stem(x).mean((2, 3)))

@register_model
def tinynet(pretrained=False, **kwargs):
    return TinyNet(num_classes=kwargs.get("num_classes", 1000))
