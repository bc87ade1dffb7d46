"""What is wrong with labelled images: what cannot be read, copies, leaks, odd ones, uneven classes, names."""
