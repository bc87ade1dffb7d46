"""A thread beside each rank that names whoever was killed or stands still, and agrees on when to stop."""
