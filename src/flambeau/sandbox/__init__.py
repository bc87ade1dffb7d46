"""Where a user's code can run without harm: a view of the file system that is thrown away."""
