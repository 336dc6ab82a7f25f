from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from lockstep.processes.child import gc_paused

CYCLE = """
import gc
from lockstep.processes.child import relax_gc

class Node:
    def __init__(self):
        self.itself = self

    def __del__(self):
        print("found")

gc.collect()
node = Node()
del node
"""


@pytest.mark.parametrize(("call", "found"), [("", "found\n"), ("relax_gc(); relax_gc()", "")])
def test_a_process_that_searches_rarely_does_not_search_at_its_end(call: str, found: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CYCLE + call], capture_output=True, text=True, check=True, timeout=60
    )
    assert (ended.stdout, ended.stderr) == (found, "")


def test_the_search_is_held_back_and_goes_on() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
