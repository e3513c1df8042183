"""A thin reader of NVIDIA's management library: which GPUs are here, how they are linked, and how much they work.

It calls `libnvidia-ml.so.1`, which comes with the driver, through ctypes: nothing has to be installed. Everything is
behind `Nvml`, whose library can be a recorded one. Not for: what a node offers of it (`worker.inventory`), nor when to
look (`worker.gpu_use`). Reading may take seconds when a GPU is broken: not in a thread that must not wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from worker.agent_log import log

LIBRARY: Final = "libnvidia-ml.so.1"
_TEXT_BYTES: Final = 96
"""The longest buffer that NVML asks for a name or an id."""
_P2P_BY_NVLINK: Final = 2
"""`NVML_P2P_CAPS_INDEX_NVLINK`."""
_NOT_SUPPORTED: Final = 3
_NOT_FOUND: Final = 6
_NO_SUCH_FUNCTION: Final = 13
_LOST: Final = 15
_NEEDS_RESET: Final = 16
Handle = ctypes.c_void_p
_ERRORS: Final = {
    1: "NVML is not initialised",
    2: "an argument is not valid",
    _NOT_SUPPORTED: "the device does not support it",
    4: "not permitted",
    _NOT_FOUND: "not found",
    9: "the NVIDIA driver is not loaded",
    12: "a library of the driver is missing",
    _NO_SUCH_FUNCTION: "the driver does not have this function",
    _LOST: "the GPU is lost: it has fallen off the bus or is not accessible",
    _NEEDS_RESET: "the GPU needs a reset",
    18: "driver and library are of different versions; a reboot (or reloading the driver) mends it",
    999: "an unknown error of the driver",
}


class NvmlError(OSError):
    """A call did not succeed; the message names it and says why."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {_ERRORS.get(code, 'error')} (NVML error {code})")
        self.code = code


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilisation(ctypes.Structure):
    """Per cent of the last sample period in which a kernel ran, and in which memory was read or written."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


@dataclass(frozen=True, kw_only=True)
class NvmlDevice:
    """A GPU, or an instance of one that is split (MIG)."""

    index: int
    """Place among all devices, from 0."""
    uuid: str
    model: str
    memory_bytes: int
    """0 where the device has none of its own."""
    pci_bus_id: str
    """As the kernel writes it: `0000:3b:00.0`."""
    link_group: str | None
    """Devices of one group reach each other over NVLink; None: over none."""


@dataclass(frozen=True, kw_only=True)
class NvmlUse:
    """How much a device works now."""

    uuid: str
    utilisation: float
    """Share of the last sample period (up to a second), 0 to 1, in which it ran anything."""
    memory_bytes: int
    """Used."""


class Nvml:
    """The library, initialised. Not thread-safe. `close` it."""

    def __init__(self, library: Any) -> None:
        """`library`: the loaded shared library, or one that plays it. Raises NvmlError."""
        self._library = library
        self._call("nvmlInit_v2")

    @classmethod
    def open(cls) -> Nvml | None:
        """The library of this machine; None where there is none (no NVIDIA driver). Raises NvmlError."""
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return None
        return cls(library)

    def close(self) -> None:
        """Let go of the driver."""
        self._call("nvmlShutdown")

    def devices(self) -> tuple[NvmlDevice, ...]:
        """Every GPU in the driver's order; one that is split (MIG) by its instances. A GPU that is lost is left out and
        keeps its place, so that the others keep their indexes. Raises NvmlError."""
        gpus = self._handles()
        groups = self._link_groups(gpus)
        found: list[NvmlDevice] = []
        index = 0
        for gpu, group in zip(gpus, groups, strict=True):
            if gpu is None:
                log("gpu_left_out", index=index, why=_ERRORS[_LOST])
                index += 1
                continue
            for handle, is_instance in self._parts(gpu):
                found.append(self._device(gpu, handle, index, None if is_instance else group))
                index += 1
        return tuple(found)

    def _device(self, gpu: Handle, handle: Handle, index: int, group: str | None) -> NvmlDevice:
        return NvmlDevice(
            index=index,
            uuid=self._text("nvmlDeviceGetUUID", handle),
            model=self._text("nvmlDeviceGetName", handle),
            memory_bytes=self._memory(handle).total,
            pci_bus_id=self._bus_id(gpu),
            link_group=group,
        )

    def use(self) -> tuple[NvmlUse, ...]:
        """How much each device works. One that cannot say so (an instance of a split GPU, a GPU that is lost) is left
        out. Raises NvmlError when the driver itself is gone."""
        return tuple(
            found
            for gpu in self._handles()
            if gpu is not None
            for handle, is_instance in self._parts(gpu)
            if not is_instance and (found := self._use_of(handle)) is not None
        )

    def _use_of(self, handle: Handle) -> NvmlUse | None:
        rates = _Utilisation()
        try:
            self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates))
            return NvmlUse(
                uuid=self._text("nvmlDeviceGetUUID", handle),
                utilisation=min(1.0, rates.gpu / 100),
                memory_bytes=self._memory(handle).used,
            )
        except NvmlError:
            return None  # of this device nothing is known; of the others it still is

    # --- Calls -------------------------------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError as error:  # a driver older than the function
            raise NvmlError(name, _NO_SUCH_FUNCTION) from error
        code = function(*arguments)
        if code != 0:
            raise NvmlError(name, code)

    def _handles(self) -> list[Handle | None]:
        """Of each GPU by the driver's number; None for one that is lost."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return [self._handle_of(number) for number in range(count.value)]

    def _handle_of(self, number: int) -> Handle | None:
        try:
            return self._handle("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number))
        except NvmlError as error:
            if error.code in (_LOST, _NEEDS_RESET):
                return None
            raise

    def _handle(self, name: str, *arguments: Any) -> Handle:
        handle = Handle()
        self._call(name, *arguments, ctypes.byref(handle))
        return handle

    def _parts(self, gpu: Handle) -> Iterator[tuple[Handle, bool]]:
        """(handle, whether it is an instance): the GPU itself, or the instances that it is split into."""
        mode, pending = ctypes.c_uint(), ctypes.c_uint()
        if not self._can("nvmlDeviceGetMigMode", gpu, ctypes.byref(mode), ctypes.byref(pending)) or not mode.value:
            yield gpu, False
            return
        most = ctypes.c_uint()
        self._call("nvmlDeviceGetMaxMigDeviceCount", gpu, ctypes.byref(most))
        for number in range(most.value):
            instance = Handle()
            place = (gpu, ctypes.c_uint(number), ctypes.byref(instance))
            # Places that no instance was made for answer "not found".
            if self._can("nvmlDeviceGetMigDeviceHandleByIndex", *place, absent=_NOT_FOUND):
                yield instance, True

    def _can(self, name: str, *arguments: Any, absent: int = _NOT_SUPPORTED) -> bool:
        try:
            self._call(name, *arguments)
        except NvmlError as error:
            if error.code in (absent, _NOT_SUPPORTED, _NO_SUCH_FUNCTION):
                return False
            raise
        return True

    def _text(self, name: str, handle: Handle) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(name, handle, buffer, ctypes.c_uint(_TEXT_BYTES))
        return buffer.value.decode("utf-8", "replace")

    def _memory(self, handle: Handle) -> _Memory:
        memory = _Memory()
        self._can("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return memory

    def _bus_id(self, handle: Handle) -> str:
        info = _PciInfo()
        self._call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(info))
        # NVML writes the domain with eight digits, the kernel with four.
        return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"

    def _link_groups(self, gpus: list[Handle | None]) -> list[str | None]:
        """Per GPU the lowest number among those that it reaches over NVLink, directly or over others."""
        lowest = list(range(len(gpus)))
        for first in range(len(gpus)):
            for second in range(first + 1, len(gpus)):
                if self._are_linked(gpus[first], gpus[second]):
                    old, new = max(lowest[first], lowest[second]), min(lowest[first], lowest[second])
                    lowest = [new if number == old else number for number in lowest]
        return [str(number) if lowest.count(number) > 1 else None for number in lowest]

    def _are_linked(self, first: Handle | None, second: Handle | None) -> bool:
        if first is None or second is None:
            return False
        status = ctypes.c_int(-1)
        is_known = self._can(
            "nvmlDeviceGetP2PStatus", first, second, ctypes.c_int(_P2P_BY_NVLINK), ctypes.byref(status)
        )
        return is_known and status.value == 0
