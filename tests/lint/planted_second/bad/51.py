import torch
import torch.nn as nn

criterion = nn.BCEWithLogitsLoss()

def train_step(model, optimizer, x, y):
    model.train()
    optimizer.zero_grad()
    prob = torch.sigmoid(model(x)).squeeze(1)
    loss = criterion(prob, y.float())
    loss.backward()
    optimizer.step()
    return loss.item()
