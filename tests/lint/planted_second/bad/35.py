import torch
import torch.nn.functional as F

def run(model, loader, opt, log):
    model.train()
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if i % 100 == 0:
            norm = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
            log(i, norm)
