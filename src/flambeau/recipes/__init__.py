"""One technique per file, torch only: what the rest of flambeau is made of, and what anyone may copy."""
