# planted: line 8, torch.floor_divide / // on indices: rounding changed from trunc to floor; since torch 1.13
import torch


def decode_topk(scores, k):
    batch, classes, h, w = scores.size()
    topk_scores, topk_inds = torch.topk(scores.view(batch, -1), k)
    topk_clses = torch.floor_divide(topk_inds, h * w)
    topk_inds = topk_inds % (h * w)
    topk_ys = torch.div(topk_inds, w, rounding_mode="floor")
    topk_xs = topk_inds % w
    return topk_scores, topk_clses, topk_ys, topk_xs
