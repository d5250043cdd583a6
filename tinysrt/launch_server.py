"""`python -m tinysrt.launch_server --model-path …`: SGLang's way to start a server; the same as `tinysrt serve`."""

from __future__ import annotations

import sys

from tinysrt.cli import main

if __name__ == "__main__":  # a spawned child imports this module again, and must not start a server of its own
    sys.exit(main(["serve", *sys.argv[1:]]))
