# planted: line 5, torch._six was removed; since torch 2.0
import re

import torch
from torch._six import string_classes
from torch.utils.data.dataloader import default_collate

np_str = re.compile(r"[SaUO]")


def collate(batch):
    elem = batch[0]
    if isinstance(elem, string_classes):
        return batch
    if isinstance(elem, torch.Tensor):
        return torch.stack(batch, 0)
    return default_collate(batch)
