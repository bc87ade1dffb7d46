"""The optional C kernel for JPEG, compiled when the package is installed, and its binding."""
