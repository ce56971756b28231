"""The in-process grid's threads: what they may do at once."""

import ast
import sys
import threading
import time

import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flrce.flower.grid import serialize_calls


def test_one_thread_at_a_time_and_a_call_within_a_call():
    inside, most = [], []

    @serialize_calls
    def work(depth):
        inside.append(depth)
        most.append(len(inside))
        time.sleep(0.001)
        if depth:
            work(depth - 1)
        inside.pop()

    threads = [threading.Thread(target=work, args=(1,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(most) == [1] * 8 + [2] * 8


@pytest.mark.skipif(sys.version_info >= (3, 11, 8), reason="mended in Python itself")
def test_threads_that_read_arrays_take_turns_to_parse():
    assert hasattr(ast.parse, "__wrapped__")
    assert ast.literal_eval("{'shape': (3,)}") == {"shape": (3,)}
