"""`Run` makes a user's training loop exact, resumable and fast: options, loop, run folder, trackers."""
