import torch

def ridge(x, y, lam):
    """closed form ridge regression head"""
    eye = torch.eye(x.shape[1], device=x.device)
    a = x.T @ x + lam * eye
    b = x.T @ y
    w, _ = torch.solve(b, a)
    return w

if __name__ == "__main__":
    feats = torch.randn(100, 8)
    labels = torch.nn.functional.one_hot(torch.randint(0, 5, (100,)), 5).float()
    print(ridge(feats, labels, 0.1))
