# planted: line 11, tensor.data.numpy() shares memory and hides errors; use detach(); since torch 0.4
import matplotlib.pyplot as plt
import torch

model = torch.nn.Linear(1, 1)
x = torch.unsqueeze(torch.linspace(-1, 1, 100), dim=1)
y = x.pow(2) + 0.2 * torch.rand(x.size())

prediction = model(x)
plt.scatter(x.numpy(), y.numpy())
plt.plot(x.numpy(), prediction.data.numpy(), "r-", lw=5)
plt.show()
