"""One technique per file, importing only torch; flambeau is built from them, and anyone may copy them."""
