"""Images with a mask each: the number of a class for every pixel."""
