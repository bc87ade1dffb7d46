"""Many runs as one experiment."""
