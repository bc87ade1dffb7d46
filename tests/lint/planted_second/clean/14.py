import torch

def beam(logp, vocab, beams):
    top, idx = logp.view(-1).topk(beams)
    prev = torch.div(idx, vocab, rounding_mode="floor")
    word = idx % vocab
    return top, prev, word

def lr_at(step, warmup):
    return min(1.0, step / warmup)
