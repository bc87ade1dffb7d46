import torch


class FeatureExtractor(torch.nn.Module):
    def __init__(self, pretrained_model, layers_to_extract):
        super().__init__()
        self.model = pretrained_model
        self.layers_to_extract = set(layers_to_extract)

    def forward(self, x):
        features = []
        for name, layer in self.model.named_children():
            x = layer(x)
            if name in self.layers_to_extract:
                features.append(x)  # here: left, which layers write in place is not in the file
        return features
