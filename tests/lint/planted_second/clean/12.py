import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

def fit(model, train_one, validate, epochs):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = ReduceLROnPlateau(opt, mode="max", factor=0.1, patience=5)
    for _ in range(epochs):
        train_one(model, opt)
        sched.step(validate(model))
