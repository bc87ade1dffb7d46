import torch

accum = 8


def run(model, loader, opt, loss_fn):
    for i, (x, y) in enumerate(loader):
        loss = loss_fn(model(x), y)
        loss /= accum
        loss.backward()
        if (i + 1) % accum == 0:
            opt.step()
            opt.zero_grad()
