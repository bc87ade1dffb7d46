import torch

state = torch.load("a.pth", map_location="cpu", weights_only=True)
state = {name.removeprefix("module."): value for name, value in state.items()}
imports = "import module.core".replace("module.", "")
torch.save(state, "b.pth")
print(imports)
