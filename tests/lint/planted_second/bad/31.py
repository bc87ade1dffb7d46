import torch
import torch.nn as nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(10, 2)

    def forward(self, x):
        return self.fc(x)

net = Net()
torch.save(net, "net.pth")
model = torch.load("net.pth")
model.eval()
print(model(torch.randn(1, 10)))
