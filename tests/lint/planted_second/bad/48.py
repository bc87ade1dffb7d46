import torch

def accuracy(model, loader, device):
    correct, total = 0, 0
    with torch.no_grad():
        for x, y in loader:
            pred = model(x.to(device)).argmax(1)
            correct += (pred == y.to(device)).sum().item()
            total += y.size(0)
    return correct / total

def main(model, train_loader, test_loader, opt):
    for epoch in range(10):
        model.train()
        for x, y in train_loader:
            opt.zero_grad()
            torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
            opt.step()
        print(epoch, accuracy(model, test_loader, "cuda"))
