import shutil

import torch


def save(state, model_path, is_best):
    torch.save(state, model_path)
    if is_best:
        shutil.copy("checkpoint.pth.tar", model_path)  # here: left, which file is the new one is in its name alone
