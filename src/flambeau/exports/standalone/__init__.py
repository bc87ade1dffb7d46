"""Files that are copied into an export, where they run without flambeau: NumPy and Pillow are enough."""
