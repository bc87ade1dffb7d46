# planted: line 11, k.replace('module.', '') also hits inner names; in all versions
from collections import OrderedDict

import torch


def load_parallel(model, path):
    state_dict = torch.load(path, map_location="cpu")
    new_state_dict = OrderedDict()
    for k, v in state_dict.items():
        new_state_dict[k.replace("module.", "")] = v
    model.load_state_dict(new_state_dict)
    return model
