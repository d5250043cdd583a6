"""Run as a program: starts a server's children, prints their pids and socket directory, and waits to be killed."""

from __future__ import annotations

import json
import threading
import time

from tests.processes import fakes
from tinysrt.processes import launch
from tinysrt.server_args import ServerArgs


def main() -> None:
    launched = launch(ServerArgs(), fakes.writes_socket_then_ready, fakes.ready)
    launched.wait_ready()
    pids = [child.process.pid for child in launched.children]
    print(json.dumps({"pids": pids, "directory": launched.ipc_names.directory}), flush=True)
    time.sleep(600)


def main_in_a_thread() -> None:
    """Launch from a thread that ends at once: its children must live on, for as long as the process does."""
    launched = []
    starter = threading.Thread(target=lambda: launched.append(launch(ServerArgs(), fakes.ready, fakes.ready)))
    starter.start()
    starter.join()
    launched[0].wait_ready()
    time.sleep(0.5)
    print(json.dumps([child.process.is_alive() for child in launched[0].children]), flush=True)


if __name__ == "__main__":
    import sys

    main_in_a_thread() if "thread" in sys.argv else main()
