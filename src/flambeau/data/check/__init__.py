"""What is wrong with labelled images: unreadable ones, copies, leaks, odd ones, uneven classes, names."""
