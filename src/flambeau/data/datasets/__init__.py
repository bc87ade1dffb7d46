"""A source, decoding and transforms put together: batches of images, on the host or on the device."""
