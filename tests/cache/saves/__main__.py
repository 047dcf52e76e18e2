"""Writes saves by the library of another checkout; see the package."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.cache import saves

parser = argparse.ArgumentParser()
parser.add_argument("--tree", type=Path, required=True, help="a checkout of an earlier version")
parser.add_argument("names", nargs="*", default=list(saves.KINDS), help="default: all")
options = parser.parse_args()
sys.path.insert(0, str(options.tree.resolve()))
import kvjax  # noqa: E402

for name in options.names:
    with tempfile.TemporaryDirectory() as scratch:
        saves.write(kvjax, name, Path(scratch))
    print(f"{name}: {(saves.FOLDER / f'{name}.zip').stat().st_size} bytes")
