import os

import torch


def resume(model, path):
    assert os.path.isfile(path)
    checkpoint = torch.load(path)  # here: left, right on the machine that wrote it
    model.load_state_dict(checkpoint["model"])
    return checkpoint["epoch"] + 1
