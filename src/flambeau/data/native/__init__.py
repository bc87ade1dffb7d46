"""A small C kernel for segmented JPEGs, built at install where a C compiler is; `kernel` loads it."""
