# planted: line 12, register_backward_hook is deprecated; use register_full_backward_hook; since torch 1.8
import torch
import torch.nn as nn


class GradCam:
    def __init__(self, model, target_layer):
        self.model = model
        self.gradients = None
        self.activations = None
        target_layer.register_forward_hook(self.save_activation)
        target_layer.register_backward_hook(self.save_gradient)

    def save_activation(self, module, input, output):
        self.activations = output.detach()

    def save_gradient(self, module, grad_input, grad_output):
        self.gradients = grad_output[0].detach()


cam = GradCam(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
