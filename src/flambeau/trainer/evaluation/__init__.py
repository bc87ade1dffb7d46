"""What an evaluation found: its figures as text and data, the file of predictions, the picture."""
