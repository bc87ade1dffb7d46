import torch
import lightning as L

class GAN(L.LightningModule):
    def __init__(self, g, d):
        super().__init__()
        self.automatic_optimization = False
        self.g, self.d = g, d

    def training_step(self, batch, batch_idx):
        og, od = self.optimizers()
        z = torch.randn(batch.size(0), 64, device=self.device)
        d_loss = self.d(self.g(z).detach()).mean() - self.d(batch).mean()
        od.zero_grad()
        self.manual_backward(d_loss)
        od.step()
        g_loss = -self.d(self.g(z)).mean()
        og.zero_grad()
        self.manual_backward(g_loss)
        og.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(m.parameters(), lr=2e-4) for m in (self.g, self.d)]
