"""A thread beside each rank names who was killed or makes no progress, and agrees on when to stop."""
