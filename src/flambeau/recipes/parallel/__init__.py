"""Several processes and devices: groups, synchronized statistics, sums in a fixed order, models in parts."""
