import torch.nn as nn
from torchvision.models.utils import load_state_dict_from_url

URL = "https://download.pytorch.org/models/vgg16-397923af.pth"

class VGGFeat(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, padding=1)
        state = load_state_dict_from_url(URL, progress=True)
        self.conv.load_state_dict(
            {"weight": state["features.0.weight"], "bias": state["features.0.bias"]}
        )

    def forward(self, x):
        return self.conv(x).relu()
