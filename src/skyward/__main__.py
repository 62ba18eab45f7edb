"""`python -m skyward` is the `sky` command."""

import sys

from skyward.cli import main

if __name__ == "__main__":
    sys.exit(main())
