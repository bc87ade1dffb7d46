from collections import OrderedDict

import torch


def by_length(model, path):
    state = OrderedDict()
    for k, v in torch.load(path, map_location="cpu").items():
        name = k[7:]  # here: FLB438
        state[name] = v
    model.load_state_dict(state)


def by_replace(model, path):
    state = torch.load(path, map_location="cpu")
    model.load_state_dict({k.replace("module.", ""): v for k, v in state.items()})  # here: FLB403
