import torchvision

features = torchvision.models.vgg16(pretrained=True).features  # here: FLB2151
