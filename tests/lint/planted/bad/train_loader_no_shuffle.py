# planted: line 7, training DataLoader without shuffle; in all versions
import torch
from torchvision import datasets, transforms

tfm = transforms.ToTensor()
train_set = datasets.FashionMNIST("data", train=True, transform=tfm)
train_loader = torch.utils.data.DataLoader(train_set, batch_size=64)

model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in train_loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
