"""Networks, initialization and parameter groups."""
