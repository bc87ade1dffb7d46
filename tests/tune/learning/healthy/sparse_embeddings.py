"""Factorize ratings with sparse embeddings: most rows have no gradient in a step."""

import torch
from torch import nn

NUM_USERS = 2000
NUM_ITEMS = 500


class Factors(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.users = nn.Embedding(NUM_USERS, dim, sparse=True)
        self.items = nn.Embedding(NUM_ITEMS, dim, sparse=True)
        nn.init.normal_(self.users.weight, std=0.3)
        nn.init.normal_(self.items.weight, std=0.3)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(1)


torch.manual_seed(0)
true_users = 0.7 * torch.randn(NUM_USERS, 4)
true_items = 0.7 * torch.randn(NUM_ITEMS, 4)
model = Factors()
optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.02)
for step in range(400):
    user = torch.randint(NUM_USERS, (256,))
    item = torch.randint(NUM_ITEMS, (256,))
    rating = (true_users[user] * true_items[item]).sum(1)
    loss = nn.functional.mse_loss(model(user, item), rating)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")
