# planted: line 6, MNIST.train_data was renamed to data; since torchvision 0.2.2
import torchvision.transforms as transforms
from torchvision import datasets

train_dataset = datasets.MNIST("data", train=True, transform=transforms.ToTensor())
print(train_dataset.train_data.size())

for i in range(3):
    image, label = train_dataset[i]
    print(image.mean().item(), label)
