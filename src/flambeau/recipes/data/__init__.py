"""Record files, sample order and the transfer of a batch to the device."""
