"""`python -m flambeau_lint`: the command of the package."""

import sys

from flambeau_lint.command import main

if __name__ == "__main__":
    sys.exit(main())
