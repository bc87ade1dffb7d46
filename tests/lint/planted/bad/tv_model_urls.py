# planted: line 4, torchvision.models.resnet.model_urls was removed; since torchvision 0.13
import torch
from torch.hub import load_state_dict_from_url
from torchvision.models.resnet import BasicBlock, ResNet, model_urls


class ResNetFeatures(ResNet):
    def __init__(self):
        super().__init__(BasicBlock, [2, 2, 2, 2])

    def load(self):
        self.load_state_dict(load_state_dict_from_url(model_urls["resnet18"]))
