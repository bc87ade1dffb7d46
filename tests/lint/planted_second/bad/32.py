import torch

def decode(scores, width, k=100):
    b = scores.size(0)
    topk_scores, topk_inds = torch.topk(scores.view(b, -1), k)
    ys = (topk_inds / width).long().float()
    xs = (topk_inds % width).float()
    return topk_scores, ys, xs

def beam(logp, vocab, beams):
    top, idx = logp.view(-1).topk(beams)
    prev = idx / vocab
    word = idx % vocab
    return top, logp[prev], word
