# planted: line 11, pickle_module= turns weights_only off: code of the file is executed; since torch 2.6
import pickle
from functools import partial

import torch

pickle.load = partial(pickle.load, encoding="latin1")


def load_old(path):
    ckpt = torch.load(path, map_location="cpu", pickle_module=pickle)
    return ckpt["state_dict"]


print(len(load_old("resnet_py2.pth")))
