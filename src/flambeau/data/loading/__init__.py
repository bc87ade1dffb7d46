"""Batches in their order: the loader, its worker processes, prefetching, and a user's own DataLoader."""
