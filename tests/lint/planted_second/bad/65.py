import torch
import torch.nn.functional as F

class Trainer:
    def __init__(self, model):
        self.model = model.cuda()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.scaler = torch.amp.GradScaler("cuda")

    def train_epoch(self, loader):
        self.model.train()
        for x, y in loader:
            self.opt.zero_grad()
            with torch.autocast("cuda"):
                loss = F.cross_entropy(self.model(x.cuda()), y.cuda())
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
