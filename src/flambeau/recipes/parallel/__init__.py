"""Several processes and devices: groups, synchronized statistics, fixed-order sums, split models."""
