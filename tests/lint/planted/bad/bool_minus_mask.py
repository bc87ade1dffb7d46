# planted: line 9, 1 - mask on a comparison result fails for bool tensors; use ~; since torch 1.2
import torch


def masked_loss(pred, target, lengths):
    max_len = pred.size(1)
    steps = torch.arange(max_len).unsqueeze(0)
    mask = steps < lengths.unsqueeze(1)
    padding = 1 - mask
    err = (pred - target) ** 2
    return err.masked_fill(padding, 0).sum() / mask.sum()
