# planted: line 8, torch.gels was renamed and removed; since torch 1.2
import torch

x = torch.linspace(0, 1, 20).unsqueeze(1)
y = 3 * x + 0.5 + 0.01 * torch.randn(20, 1)
design = torch.cat([x, torch.ones_like(x)], 1)

result, _ = torch.gels(y, design)
slope, intercept = result[:2, 0]
print("slope %.3f intercept %.3f" % (slope, intercept))
