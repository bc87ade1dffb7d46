"""Worker processes of a loader: their life, what each one reads now, and how batches travel to the parent."""
