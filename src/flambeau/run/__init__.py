"""`Run` makes a training loop of your own exact, resumable and fast: options, loop, run folder, trackers."""
