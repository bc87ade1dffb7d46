"""Networks, initialisation and parameter groups."""
