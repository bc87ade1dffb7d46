import torch as th
import torch.nn as nn

class Net(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.fc = nn.Linear(n, 5)

    def forward(self, x):
        return self.fc(x)

    @th.no_grad()
    def predict_proba(self, x):
        self.eval()
        return th.softmax(self(x), dim=1)

net = Net(4)
crit = nn.CrossEntropyLoss()
opt = th.optim.Adam(net.parameters())
net.train()
opt.zero_grad()
crit(net(th.randn(8, 4)), th.randint(0, 5, (8,))).backward()
opt.step()
