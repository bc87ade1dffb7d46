"""Several processes and devices: groups, synchronised statistics, uneven inputs, models in parts."""
