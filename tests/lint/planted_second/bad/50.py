import torch
import torch.nn as nn

class Classifier(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.fc1 = nn.Linear(n_in, 128)
        self.fc2 = nn.Linear(128, n_out)
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        return self.softmax(self.fc2(x))

model = Classifier(20, 5)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.randn(8, 20), torch.randint(0, 5, (8,))
optimizer.zero_grad()
criterion(model(x), y).backward()
optimizer.step()
