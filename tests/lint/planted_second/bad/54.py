import torch
import torch.nn.functional as F

def train(model, loader, opt):
    scaler = torch.amp.GradScaler("cuda")
    model.train()
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda"):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
