# planted: line 14, torch.autograd.Variable is a no-op since tensors and variables merged; since torch 0.4
import torch
from torch.autograd import Variable


class ReplayTrainer:
    def __init__(self, net, memory):
        self.net = net
        self.memory = memory
        self.opt = torch.optim.RMSprop(net.parameters())

    def learn(self):
        state, target = self.memory.sample(32)
        state = Variable(state)
        loss = (self.net(state) - target).pow(2).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
