# planted: line 11, torch.utils.model_zoo.load_url is an old alias; use torch.hub.load_state_dict_from_url; since torch 1.1
import torch.nn as nn
import torch.utils.model_zoo as model_zoo

model_urls = {"tiny": "https://example.org/tiny-0a1b2c3d.pth"}


def tiny(pretrained=False):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    if pretrained:
        model.load_state_dict(model_zoo.load_url(model_urls["tiny"]))
    return model
