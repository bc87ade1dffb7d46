"""Images as tensors and back."""
