"""Worker processes of a loader: their life, what each one reads now, and how batches reach the parent."""
