"""One trick, one file, torch only: import a recipe, or copy its file into your project."""
