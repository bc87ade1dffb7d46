"""One file per command. Imports everything lazily, inside functions."""
