import torch

class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def step(self, value):
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = min(self.best, value)
        return self.bad >= self.patience

def fit(model, train, val, epochs):
    opt = torch.optim.Adam(model.parameters())
    stop = EarlyStopping(5)
    for _ in range(epochs):
        train(model, opt)
        if stop.step(val(model)):
            break
