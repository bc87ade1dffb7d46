# planted: line 11, shuffle=True with a sampler raises ValueError; in all versions
import torch.utils.data
import torchvision.datasets as datasets
import torchvision.transforms as transforms

train_dataset = datasets.ImageFolder("data/train", transforms.ToTensor())
train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
train_loader = torch.utils.data.DataLoader(
    train_dataset,
    batch_size=64,
    shuffle=True,
    num_workers=8,
    sampler=train_sampler,
)
for epoch in range(3):
    train_sampler.set_epoch(epoch)
    for images, labels in train_loader:
        print(images.shape)
