"""Notes on migrating: torch.symeig, F.upsample and Variable(x, volatile=True) are gone."""

OLD = {
    "torch.rfft": "torch.fft.rfft",
    "torch.cuda.amp.autocast": "torch.autocast",
    "loss.data[0]": "loss.item()",
}


def advise(line):
    # torch.set_default_tensor_type(torch.FloatTensor) was here
    return [new for old, new in OLD.items() if old in line]
