import torch


class Loop(torch.nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = torch.jit.trace(cell, torch.ones(1, 4))  # here: FLB260

    def forward(self, xs):
        h = torch.zeros(1, 4)
        for i in range(xs.size(0)):
            h = self.cell(h + xs[i])
        return h


scripted = torch.jit.script(Loop(torch.nn.Linear(4, 4)))  # here: FLB259
scripted.save("loop.pt")
loaded = torch.jit.load("loop.pt")  # here: FLB261
