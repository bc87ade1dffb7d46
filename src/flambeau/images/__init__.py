"""Pixels from the bytes of one image: decoders, orientation, and the threads that run them."""
