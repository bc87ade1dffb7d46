"""A trained model for others: a folder with one graph from pixels to probabilities; it needs no flambeau."""
