import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

def fit(model, train_one, validate, epochs):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    sched = ReduceLROnPlateau(opt, mode="min", factor=0.5, patience=3, verbose=True)
    for epoch in range(epochs):
        train_one(model, opt)
        val_loss = validate(model)
        sched.step(val_loss)
