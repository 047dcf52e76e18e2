"""`python -m kvjax.cli`."""

import sys

from kvjax.cli import main

sys.exit(main())
