import torch
from torchvision.models.resnet import ResNet, BasicBlock, model_urls

class ResNet18Features(ResNet):
    def __init__(self):
        super().__init__(BasicBlock, [2, 2, 2, 2])

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))

def resnet18():
    net = ResNet18Features()
    net.load_state_dict(torch.hub.load_state_dict_from_url(model_urls["resnet18"]))
    return net
