"""Find what went wrong in a training."""
