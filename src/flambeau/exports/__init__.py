"""A trained model as a folder with one graph from pixels to predictions, which needs no flambeau."""
