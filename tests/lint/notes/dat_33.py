from torchvision import transforms

val_transform = transforms.Compose(
    [
        transforms.Resize(224),  # here: left, a size that somebody chose
        transforms.CenterCrop(224),
        transforms.ToTensor(),
    ]
)
