"""Record files, sample order and the way of a batch to the device."""
