# planted: line 20, scheduler.step(epoch): the epoch argument is deprecated; since torch 1.4
import torch
import torch.optim as optim
from torch.optim import lr_scheduler


class Trainer(object):
    def __init__(self, model, loader):
        self.model = model
        self.loader = loader
        self.optimizer = optim.Adam(model.parameters(), lr=1e-4)
        self.scheduler = lr_scheduler.MultiStepLR(self.optimizer, milestones=[30, 60])

    def train_epoch(self, epoch):
        for lr, hr in self.loader:
            self.optimizer.zero_grad()
            loss = (self.model(lr) - hr).abs().mean()
            loss.backward()
            self.optimizer.step()
        self.scheduler.step(epoch)
