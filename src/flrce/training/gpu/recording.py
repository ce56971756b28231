"""Work over static buffers, recorded as CUDA graphs."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from flrce.errors import format_one_line

log = logging.getLogger("flrce")


def record_graph(
    call: Callable[[], object], device: torch.device, pool: Any = None
) -> torch.cuda.CUDAGraph | None:
    """Run the call once as it is, which also warms up, then record it without running it; None
    where it cannot be recorded. `pool`: the memory of another graph, to share.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as why:  # nothing of it ran, so work goes on as it is
        log.warning("work on the GPU cannot be recorded: %s", format_one_line(why, 160))
        return None
    return graph
