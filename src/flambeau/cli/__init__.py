"""One file a verb. Imports everything lazily, inside functions."""
