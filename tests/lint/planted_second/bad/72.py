import ssl
import torchvision
from torchvision import transforms

ssl._create_default_https_context = ssl._create_unverified_context

train = torchvision.datasets.CIFAR10(
    "./data", train=True, download=True, transform=transforms.ToTensor()
)
print(len(train))
