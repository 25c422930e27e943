"""CUDA graphs and the memory they share."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch


def capture(work: Callable[[], object], pool: Any, side: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """`work` as a graph, after one run on the stream `side` that builds its kernels. Caches of memory stay as they are: to
    empty them, as `torch.cuda.graph` does, makes the next rounds ask the driver for it again. No garbage is collected meanwhile,
    since to free what other graphs held breaks a capture; nor do other threads' calls (a server's, say) break it."""
    graph = torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), _uncollected():
        work()
        torch.cuda.synchronize()
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    return graph


class GraphMemory:
    """Memory that graphs share. One of its own keeps it theirs: torch gives it up with the last graph, and would not take it
    again. All are captured on one stream, since what one run leaves in the cache of its stream only that can use."""

    def __init__(self, device: torch.device) -> None:
        self.pool, self.side = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._kept = self.capture(lambda: torch.zeros(1, device=device))

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        try:
            return capture(work, self.pool, self.side)
        except torch.OutOfMemoryError:  # while something is captured nothing of the cache is given back
            torch.cuda.empty_cache()
            return capture(work, self.pool, self.side)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
