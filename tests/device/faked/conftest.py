"""Tests in this folder register a device that does not exist, for good: `tests/device/test_fake_device.py` runs them
in a process of their own. By hand:

    TINYSRT_FAKE_DEVICE=1 python -m pytest tests/device/faked
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TINYSRT_FAKE_DEVICE") == "1" else ["test_*.py"]
