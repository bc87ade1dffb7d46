"""`python -m flambeau` is the `flambeau` command."""

import sys

from flambeau.cli.command import main

sys.exit(main())
