import torch.nn as nn
from torch.optim import SGD


def optimizer_for(model):
    norms, weights, biases = [], [], []
    for m in model.modules():
        if hasattr(m, "bias") and isinstance(m.bias, nn.Parameter):
            biases.append(m.bias)
        if isinstance(m, nn.BatchNorm2d):
            norms.append(m.weight)
        elif hasattr(m, "weight") and isinstance(m.weight, nn.Parameter):
            weights.append(m.weight)
    optimizer = SGD(norms, lr=0.01, momentum=0.9, nesterov=True)  # here: left, right for a model of convolutions
    optimizer.add_param_group({"params": weights, "weight_decay": 5e-4})
    optimizer.add_param_group({"params": biases})
    return optimizer
