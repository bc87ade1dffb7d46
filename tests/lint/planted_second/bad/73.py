import tarfile
import urllib.request
from torchvision.datasets import ImageFolder

def fetch(url, root):
    path, _ = urllib.request.urlretrieve(url, "data.tgz")
    with tarfile.open(path) as tar:
        tar.extractall(root)
    return ImageFolder(root)
