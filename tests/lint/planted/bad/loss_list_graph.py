# planted: line 19, losses.append(loss) keeps each iteration's graph; append loss.item(); in all versions
import numpy as np
import torch
import torch.nn.functional as F


class Runner:
    def __init__(self, model, opt):
        self.model = model
        self.opt = opt
        self.losses = []

    def epoch(self, loader):
        for x, y in loader:
            self.opt.zero_grad()
            loss = F.mse_loss(self.model(x), y)
            loss.backward()
            self.opt.step()
            self.losses.append(loss)
