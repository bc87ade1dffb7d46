from torchvision.models import resnet50

model = resnet50()
print(model.layers[0].flops() / 1e9)  # here: left, what a model of another package holds is not in the file
