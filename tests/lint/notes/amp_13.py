from apex import amp  # here: FLB177


def prepare(model, optimizer):
    return amp.initialize(model, optimizer, opt_level="O1")
