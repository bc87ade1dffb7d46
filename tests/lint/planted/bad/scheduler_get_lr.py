# planted: line 15, scheduler.get_lr() is wrong outside step(); use get_last_lr(); since torch 1.4
import torch
from torch.optim.lr_scheduler import StepLR


def fit(model, loader, criterion, writer, epochs=90):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        scheduler.step()
        writer.add_scalar("lr", scheduler.get_lr()[0], epoch)
