"""One team of OpenMP threads computes; a second one in the same process costs a third of the speed.

Every thread that runs a parallel operator gets a team of its own, which lives as long as that thread. Between two
operators the team spins, so that the next one starts within a microsecond. But the library (libgomp) counts the threads
of all teams, and as soon as they are more than the cores it lets every team sleep instead of spin, the one that
computes included: a decode step starts some two hundred and fifty kernels and products, and wakes its team for each.

                                scheduler's thread      forward thread       2 cores
    loads in the first          team of 2, idle         team of 2, working   4 > 2: all teams sleep     24 ms a step
    loads in one that ends      no team                 team of 2, working   2 = 2: it spins            16 ms

So a model is loaded in a thread that ends, and the thread that only schedules never computes in parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def in_own_thread(function: Callable[[], Result]) -> Result:
    """Call it in a thread that ends with the call, and its OpenMP team with it."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="own") as thread:
        return thread.submit(function).result()
