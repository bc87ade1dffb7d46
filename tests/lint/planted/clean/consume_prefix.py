import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present


def load(model, path):
    state = torch.load(path, map_location="cpu", weights_only=True)
    consume_prefix_in_state_dict_if_present(state, "module.")
    model.load_state_dict(state)
    return model
