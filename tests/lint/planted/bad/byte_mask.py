# planted: line 9, uint8 (byte) mask for masked_fill is refused; use bool; since torch 1.2 / 2.x
import torch
import torch.nn.functional as F


def attend(q, k, v, pad):
    scores = torch.matmul(q, k.transpose(-2, -1)) / q.size(-1) ** 0.5
    mask = pad.byte()
    scores = scores.masked_fill(mask.byte(), float("-inf"))
    return torch.matmul(F.softmax(scores, dim=-1), v)
