"""`python -m kvjax.cli`."""

import sys

from kvjax_command import main

if __name__ == "__main__":
    sys.exit(main())
