"""Images to batches: sources, decoding, transforms, loading, packing. May import recipes."""
