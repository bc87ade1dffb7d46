"""Functions with a gradient of their own."""
