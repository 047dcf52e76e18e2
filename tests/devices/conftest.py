"""Tests that need 8 devices: tests/test_devices.py runs them in a process whose CPU poses as 8
devices.
"""

import os

collect_ignore_glob = (
    [] if "device_count=8" in os.environ.get("XLA_FLAGS", "") else ["test_*.py"]
)
