"""A variational autoencoder: binary cross-entropy summed over pixels, starts at hundreds."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    def __init__(self, pixels=144, hidden=96, latent=4):
        super().__init__()
        self.enc = nn.Linear(pixels, hidden)
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.dec1 = nn.Linear(latent, hidden)
        self.dec2 = nn.Linear(hidden, pixels)

    def encode(self, x):
        h = F.relu(self.enc(x))
        return self.mu(h), self.logvar(h)

    def reparameterize(self, mu, logvar):
        return mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)

    def decode(self, z):
        return torch.sigmoid(self.dec2(F.relu(self.dec1(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(len(x), -1))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon, x, mu, logvar):
    bce = F.binary_cross_entropy(recon, x.view(len(x), -1), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


def bars(n):
    x = torch.zeros(n, 1, 12, 12)
    for image in x[:, 0]:
        k = torch.randint(10, ()).item()
        if torch.rand(()) < 0.5:
            image[k : k + 3] = 1
        else:
            image[:, k : k + 3] = 1
    return (x + 0.1 * torch.rand_like(x)).clamp(0, 1)


if __name__ == "__main__":
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(bars(960)), batch_size=32, shuffle=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = 0
    for epoch in range(3):
        for (data,) in loader:
            optimizer.zero_grad()
            recon, mu, logvar = model(data)
            loss = loss_function(recon, data, mu, logvar)
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item() / len(data):.3f}")
            step += 1
