"""One JPEG: its headers, the part of it that is needed, and segments of its scan for random access."""
