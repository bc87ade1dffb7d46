"""Labelled images wherever they are: folders, packed files, arrays, sets with a name, a user's function."""
