# planted: line 18, nn.utils.clip_grad_norm without underscore is deprecated / removed; since torch 0.4
import torch
import torch.nn as nn

lr = 20.0


def train(model, corpus, get_batch, criterion, bptt=35, clip=0.25):
    model.train()
    hidden = model.init_hidden(20)
    for i in range(0, corpus.size(0) - 1, bptt):
        data, targets = get_batch(corpus, i)
        hidden = tuple(h.detach() for h in hidden)
        model.zero_grad()
        output, hidden = model(data, hidden)
        loss = criterion(output.view(-1, output.size(-1)), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm(model.parameters(), clip)
        for p in model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-lr)
