"""Tests that need 8 devices: tests/test_devices.py runs them in a process whose CPU says that it is so many."""

import os

collect_ignore_glob = [] if "device_count=8" in os.environ.get("XLA_FLAGS", "") else ["test_*.py"]
