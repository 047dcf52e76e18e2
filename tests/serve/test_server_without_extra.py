"""The example of a server where its extra is not installed."""

import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parents[2] / "examples" / "openai_server.py"
WITHOUT = """
import runpy, sys
sys.modules["uvicorn"] = None  # an import of it then says that there is none
sys.argv = [sys.argv[1], "--help"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_server_without_its_extra_says_how_to_get_it() -> None:
    command = [sys.executable, "-c", WITHOUT, str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "this server needs uvicorn, which is not installed: pip install -e '.[serve]'"
    )
