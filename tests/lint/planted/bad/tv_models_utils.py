# planted: line 3, torchvision.models.utils was removed; since torchvision 0.11
import torch.nn as nn
from torchvision.models.utils import load_state_dict_from_url


def vgg_small(url=None):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    if url is not None:
        net.load_state_dict(load_state_dict_from_url(url, progress=True))
    return net
