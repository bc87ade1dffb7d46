import torch
import torch.nn.functional as F

def train(model, loader, opt, log_every=100):
    model.train()
    total = torch.zeros((), device="cuda")
    for step, (x, y) in enumerate(loader):
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        total += loss.detach()
        if step % log_every == 0:
            print(step, loss.item())
    return (total / len(loader)).item()
