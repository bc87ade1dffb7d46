"""Bytes of one image to its pixels: decoders, orientation, and the threads that run them."""
