# planted: line 12, .item() of each element in a Python loop over a tensor: slow; in all versions
import torch


def count_correct(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            pred = model(x.cuda()).argmax(1)
            for i in range(len(pred)):
                if pred[i].item() == y[i].item():
                    correct += 1
    return correct
