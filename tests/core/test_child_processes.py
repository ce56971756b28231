"""How processes begin beside a GPU, as far as a machine without one can show it."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from flrce.core import host
from flrce.devices.costs import training_flops


def refuse():
    raise ValueError("no")


def named(folder, *names):
    """A folder as /proc/self/task is, with threads of these names."""
    for i, name in enumerate(names):
        (folder / str(i)).mkdir()
        (folder / str(i) / "comm").write_text(name + "\n")
    return folder


@pytest.mark.skipif(host.choose_start_method() != "fork", reason="this machine does not fork")
def test_a_process_forks_until_autograd_has_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "THREADS_FOLDER", named(tmp_path, "python", "pt_autograd_0"))
    assert host.choose_start_method() == "spawn"


def test_a_process_that_used_a_gpu_does_not_fork(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert host.choose_start_method() == "spawn"


def test_aside():
    assert host.run_in_child(os.getpid) != os.getpid() or host.choose_start_method() != "fork"
    assert host.run_in_child(lambda: [1.5, "x"]) == [1.5, "x"]
    with pytest.raises(ValueError, match="no"):
        host.run_in_child(refuse)
    parent = os.getpid()
    assert (
        host.run_in_child(lambda: 3 if os.getpid() == parent else os._exit(1)) == 3
    )  # a child that dies: found here


def test_a_child_does_not_wait_for_its_parents_threads():
    """A product large enough for two threads in the parent, then the same in a child; as a process
    of its own.
    """
    code = (
        "import torch; from flrce.core.host import run_in_child; torch.set_num_threads(2)\n"
        "x = torch.ones(600, 600); (x @ x).sin().sum()\n"
        "print(run_in_child(lambda: float((x @ x).exp().sin().sum())) is not None)"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env
    )
    assert done.stdout.strip() == "True", done.stderr


def test_flops_beside_a_gpu_are_the_same(monkeypatch):
    """Linear(3, 2): 2 * 3 * 2 forward and as many for its weights' gradients; the inputs ask for
    none.
    """
    net = nn.Linear(3, 2)
    here = training_flops(net, (3,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert training_flops(net, (3,)) == here == 24.0
