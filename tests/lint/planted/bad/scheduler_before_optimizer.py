# planted: line 11, scheduler.step() at the start of the epoch, before optimizer.step(): the first rate is skipped; since torch 1.1
import torch
import torch.optim as optim
from torch.optim import lr_scheduler


def train_model(model, criterion, dataloader, num_epochs=25):
    optimizer = optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    exp_lr_scheduler = lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    for epoch in range(num_epochs):
        exp_lr_scheduler.step()
        model.train()
        running_loss = 0.0
        for inputs, labels in dataloader:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item() * inputs.size(0)
        print(epoch, running_loss)
    return model
