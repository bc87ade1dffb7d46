# %% Two classes with nn.BCELoss: the model ends in a sigmoid, as that loss wants it.
import torch
import torch.nn as nn
import torch.optim as optim

# %%
torch.manual_seed(42)
X = torch.randn(1000, 2) * 1.5
y = ((X[:, 0] ** 2 + X[:, 1] ** 2) < 3.0).float().unsqueeze(1)
X_train, y_train = X[:800], y[:800]
X_test, y_test = X[800:], y[800:]
X_train.shape, y_train.shape

# %%
model = nn.Sequential(
    nn.Linear(2, 32),
    nn.ReLU(),
    nn.Linear(32, 16),
    nn.ReLU(),
    nn.Linear(16, 1),
    nn.Sigmoid(),
)
criterion = nn.BCELoss()
optimizer = optim.Adam(model.parameters(), lr=0.01)

# %%
losses = []
for step in range(150):  # full batch: the data are small
    optimizer.zero_grad()
    outputs = model(X_train)
    loss = criterion(outputs, y_train)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")

# %%
model.eval()
with torch.no_grad():
    accuracy = ((model(X_test) > 0.5) == y_test.bool()).float().mean()
print(f"test accuracy {accuracy.item():.3f}")
