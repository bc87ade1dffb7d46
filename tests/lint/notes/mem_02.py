def inplace_relu(m):
    if m.__class__.__name__.find("ReLU") != -1:
        m.inplace = True  # here: left, right for a model that reads no input of a ReLU again


def save_memory(model):
    model.apply(inplace_relu)
