"""`python -m kvjax`, the command line if its script is not on the path."""

import sys

from kvjax_command import main

if __name__ == "__main__":
    sys.exit(main())
