import numpy as np
import torch

class EarlyStopping:
    def __init__(self, patience=7, path="checkpoint.pt"):
        self.patience = patience
        self.counter = 0
        self.val_loss_min = np.Inf
        self.path = path

    def __call__(self, val_loss, model):
        if val_loss < self.val_loss_min:
            self.val_loss_min = val_loss
            self.counter = 0
            torch.save(model.state_dict(), self.path)
        else:
            self.counter += 1
        return self.counter >= self.patience
