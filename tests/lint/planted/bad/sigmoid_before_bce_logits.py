# planted: line 11, sigmoid before BCEWithLogitsLoss; in all versions
import torch
import torch.nn as nn

criterion = nn.BCEWithLogitsLoss()


def train_one(unet, batch, optimizer):
    image, mask = batch["image"], batch["mask"]
    pred = torch.sigmoid(unet(image))
    loss = criterion(pred, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)
