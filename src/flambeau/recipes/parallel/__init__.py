"""Several processes and devices: groups, synchronized statistics, uneven inputs, models in parts."""
