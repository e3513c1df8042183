"""NVML as a recording plays it: the functions of the C library that `worker.nvml` calls, answered from a JSON sample.

Answers are written through the pointers that the caller hands over, as the library does. Not for: assertions.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

NOT_SUPPORTED, NOT_FOUND, LOST = 3, 6, 15


class RecordedNvml:
    """Plays `samples/nvml-*.json`. Attributes may be changed from the test between calls."""

    def __init__(self, path: Path) -> None:
        recording = json.loads(path.read_text())
        self.devices: list[dict[str, Any]] = recording["devices"]
        self.links = {tuple(pair) for pair in recording["nvlink"]}
        self.lost: set[int] = set()
        """Numbers of GPUs that have fallen off the bus."""
        self.failing: dict[str, int] = {}
        """Error code by function, for all devices."""
        self.calls: list[str] = []
        self._handles: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        play = getattr(type(self), f"_{name}", None)
        if play is None:
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            self.calls.append(name)
            return self.failing.get(name) or int(play(self, *arguments) or 0)

        return function

    def _handle(self, device: dict[str, Any]) -> int:
        self._handles.append(device)
        return len(self._handles)

    def _of(self, handle: ctypes.c_void_p) -> dict[str, Any]:
        return self._handles[(handle.value or 0) - 1]

    def _nvmlInit_v2(self) -> None:
        pass

    def _nvmlShutdown(self) -> None:
        pass

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = len(self.devices)

    def _nvmlDeviceGetHandleByIndex_v2(self, number: ctypes.c_uint, handle: Any) -> int:
        if number.value in self.lost:
            return LOST
        handle._obj.value = self._handle(self.devices[number.value])
        return 0

    def _nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, buffer: Any, size: ctypes.c_uint) -> None:
        buffer.value = self._of(handle)["uuid"].encode()

    def _nvmlDeviceGetName(self, handle: ctypes.c_void_p, buffer: Any, size: ctypes.c_uint) -> None:
        buffer.value = self._of(handle)["name"].encode()

    def _nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> None:
        device = self._of(handle)
        memory._obj.total, memory._obj.used = device["total"], device["used"]

    def _nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, rates: Any) -> int:
        told = self._of(handle)["gpu"]
        if told is None:
            return NOT_SUPPORTED
        rates._obj.gpu, rates._obj.memory = told
        return 0

    def _nvmlDeviceGetPciInfo_v3(self, handle: ctypes.c_void_p, info: Any) -> None:
        bus = self._of(handle)["bus"]
        info._obj.domain, info._obj.bus, info._obj.device = 0, bus, 0
        info._obj.bus_id = f"00000000:{bus:02X}:00.0".encode()

    def _nvmlDeviceGetMigMode(self, handle: ctypes.c_void_p, current: Any, pending: Any) -> int:
        device = self._of(handle)
        if device.get("has_no_mig"):
            return NOT_SUPPORTED
        current._obj.value = pending._obj.value = int("instances" in device)
        return 0

    def _nvmlDeviceGetMaxMigDeviceCount(self, handle: ctypes.c_void_p, count: Any) -> None:
        count._obj.value = 7

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, handle: ctypes.c_void_p, number: ctypes.c_uint, found: Any) -> int:
        instances = self._of(handle)["instances"]
        if number.value >= len(instances) or instances[number.value] is None:
            return NOT_FOUND
        found._obj.value = self._handle(instances[number.value])
        return 0

    def _nvmlDeviceGetP2PStatus(
        self, first: ctypes.c_void_p, second: ctypes.c_void_p, index: ctypes.c_int, status: Any
    ) -> int:
        if index.value != 2:
            return NOT_SUPPORTED
        pair = tuple(sorted(self.devices.index(self._of(handle)) for handle in (first, second)))
        status._obj.value = 0 if pair in self.links else 5
        return 0
