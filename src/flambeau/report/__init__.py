"""What runs look like, as one HTML file that needs nothing else; without torch, for any program."""
