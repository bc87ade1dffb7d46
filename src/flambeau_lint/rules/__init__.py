"""The rules: tables of names, and one file for each rule that looks at more than a name."""
