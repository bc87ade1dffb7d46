"""Smaller and faster models: folded, fused, pruned, and of fewer bits."""
