"""Run by `make` before it installs: says so when pip is about to bring PyTorch's CUDA build to a machine without a GPU.

The CUDA build and the NVIDIA packages it needs are some 3.2 GB to download (measured for torch 2.13 on x86_64), the CPU
build is 0.2 GB. tinysrt runs with either, so this only tells, and `make` goes on.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

NOTICE = """
  No GPU is found here, and pip is about to install PyTorch's CUDA build: about 3.2 GB to download.
  The CPU build is about 0.2 GB and runs tinysrt just as well on this machine. To take it, stop this with Ctrl-C and say
      make {target} TORCH_INDEX=URL
  with the URL that pytorch.org > Get Started shows for pip and CPU. Going on with the CUDA build.
"""


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists() or Path("/dev/dxg").exists()


def pip_would_bring_cuda(requirement: str) -> bool:
    """Ask pip what it would install; metadata only. What cannot be found out is not worth a warning."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
    command += ["--report", "-", requirement]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        metadata = json.loads(answer.stdout)["install"][0]["metadata"]
    except (subprocess.SubprocessError, OSError, ValueError, LookupError):
        return False
    needs = [line for line in metadata.get("requires_dist", ()) if "extra ==" not in line]
    return any(line.startswith(("nvidia-", "cuda-")) for line in needs)


def main(target: str, requirement: str) -> None:
    if platform.system() == "Linux" and not has_gpu() and pip_would_bring_cuda(requirement):
        print(NOTICE.format(target=target), file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
