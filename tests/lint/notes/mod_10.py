import torch.nn as nn


def convolutions(model):
    conv_model = nn.Sequential()
    for layer in model.named_modules():
        if isinstance(layer[1], nn.Conv2d):
            conv_model.add_module(layer[0], layer[1])  # here: FLB460
    return conv_model
