import torch


def optimizer_for(model):
    bias = [param for name, param in model.named_parameters() if name[-4:] == "bias"]
    others = [param for name, param in model.named_parameters() if name[-4:] != "bias"]
    groups = [
        {"parameters": bias, "weight_decay": 0},  # here: FLB402
        {"parameters": others},  # here: FLB402
    ]
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=1e-4)
