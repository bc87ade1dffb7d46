# planted: line 11, k[7:] cuts names that have no prefix; in all versions
from collections import OrderedDict

import torch

checkpoint = torch.load("model_best.pth.tar", map_location="cpu")
state_dict = checkpoint["state_dict"]

new_state_dict = OrderedDict()
for k, v in state_dict.items():
    name = k[7:]
    new_state_dict[name] = v

torch.save(new_state_dict, "clean.pth")
