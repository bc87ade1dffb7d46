class Function:
    def __init__(self, name):
        self.name = name

    def forward(self, x):
        return x

    def backward(self, grad):
        return grad


class Twice(Function):
    def forward(self, x):
        return 2 * x

    def backward(self, grad):
        return 2 * grad
