import torch
import torch.nn.functional as F
from torchvision.models import resnet18
from apex import amp

model = resnet18(num_classes=10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")

def train_epoch(loader):
    model.train()
    for images, target in loader:
        images, target = images.cuda(), target.cuda()
        loss = F.cross_entropy(model(images), target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
