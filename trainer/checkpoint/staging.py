"""Saving beside the training: copies of the state that later steps do not change, and the thread that writes them.

Not for: what is written (`saving`), or which save waits for which (`checkpointer`).
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from trainer.checkpoint.state import local_part

T = TypeVar("T")


class KeptCopies:
    """Copies of a rank's state in the machine's memory, page-locked for a GPU. The memory is kept from save to save.

    So it costs as much memory as this rank's part of the state, from the first asynchronous save on; allocating it anew
    each time made the step wait four times as long.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state` as it is now, unaffected by later steps, until the next call. Blocks while it copies.

        A DTensor is copied as one of the same mesh and placements around this rank's part. No communication.
        """
        staged: dict[str, Any] = {}
        buffers: dict[str, torch.Tensor] = {}
        on_gpu = False
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                staged[key] = buffers[key] = self._buffer(key, value)
                local_part(buffers[key]).copy_(local_part(value), non_blocking=True)
                on_gpu = on_gpu or local_part(value).is_cuda
            else:
                staged[key] = copy.deepcopy(value)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        self._buffers = buffers
        return staged

    def _buffer(self, key: str, value: torch.Tensor) -> torch.Tensor:
        kept = self._buffers.get(key)
        if kept is not None and _form(kept) == _form(value):
            return kept
        local = local_part(value)
        is_pinned = local.is_cuda and local.numel() > 0  # nothing cannot be page-locked
        # Of a DTensor it is one, around a buffer on the CPU though its mesh is of GPUs: `from_local` would move that.
        return torch.empty_like(value, device="cpu", pin_memory=is_pinned, requires_grad=False)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    split = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.dtype, split


class BackgroundThread:
    """One thread that does one thing after another. A daemon: a process that fails does not wait for it."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` after all that was submitted before."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  # raised again where the future is asked
                future.set_exception(error)
            else:
                future.set_result(result)

        self._waiting.put(run)
        return future

    def close(self) -> None:
        """Finish what was submitted, then end. Blocks."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (run := self._waiting.get()) is not None:
            run()
