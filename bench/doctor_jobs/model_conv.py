"""A MobileNet in the memory format that is torch's default: timm's model and optimizer."""

import timm
import timm.optim
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "model"
WHERE = None
REMEDY = "channels_last"
TRAINER = "timm"


def main() -> None:
    told = job.begin(REMEDY)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 3, 96, 96), torch.randint(0, 10, (512,)))
    loader = DataLoader(job.Repeated(data, 10), batch_size=16, shuffle=True)
    model = timm.create_model("mobilenetv3_small_050", num_classes=10)
    memory_format = torch.channels_last if told.remedied else torch.contiguous_format
    model = model.to(memory_format=memory_format)
    optimizer = timm.optim.create_optimizer_v2(model, opt="sgd", lr=0.01, momentum=0.9)
    for epoch in range(100):
        for images, labels in loader:
            x = images.contiguous(memory_format=memory_format)
            loss = F.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
