"""A trained model that is used: its predictions for files and for images in memory, its features."""
