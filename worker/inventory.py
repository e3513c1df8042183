"""What this node offers: CPUs, memory, and GPUs as frozen records, behind one small interface.

Sources: `NvmlGPUs` (the devices of this machine), `CpuSlots` (a node without GPUs; each slot stands in for one) and
`RecordedGPUs` (a recorded sample, for tests and for trying out placement on machines without devices).

Not for: who holds a GPU (the service knows), nor for what a rank may see (the launcher sets CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from gangline.protocol.launch import decode
from worker.nvml import Nvml, NvmlError

KIND_GPU = "gpu"
KIND_CPU_SLOT = "cpu_slot"
CPU_SLOT_MODEL = "CPU slot"
PCI_DEVICES: Final = Path("/sys/bus/pci/devices")


class InventoryError(ValueError):
    """The devices of this node cannot be offered as asked. The message names the values and the fix."""


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One device that a job can be given; on a node without any, a CPU slot."""

    index: int
    """Place on this node, from 0, as the driver counts."""
    uuid: str
    """Id handed to ranks exactly as it is: `GPU-8932f937-…`, `MIG-…`, a plain index, or `cpu-slot-<i>`."""
    kind: str = KIND_GPU
    """`gpu` or `cpu_slot`."""
    model: str
    """Product name, as jobs ask for it in `resources.gpu`."""
    memory_bytes: int = 0
    """Memory of the device itself; 0 where it has none of its own."""
    link_group: str | None = None
    """GPUs of one group reach each other over a fast link (NVLink); None: unknown."""
    numa_node: int | None = None
    """NUMA node that the device hangs on; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Everything the scheduler may hand out on this node."""

    cpus: float
    """Cores."""
    memory_bytes: int
    gpus: tuple[GPU, ...]


class InventorySource(Protocol):
    """Where an inventory comes from. Reading may do I/O and raises InventoryError with the fix."""

    def read(self) -> Inventory:
        """The inventory as it is now."""
        ...


@dataclass(frozen=True, kw_only=True)
class CpuSlots:
    """Offers `count` CPU slots: the same path as GPUs, with gloo, on a machine without any."""

    count: int
    cpus: float | None = None
    """Cores to offer; None: one a slot."""
    memory_bytes: int | None = None
    """Memory to offer; None: all that the machine has."""

    def read(self) -> Inventory:
        """The slots. Raises InventoryError when `count` is negative."""
        if self.count < 0:
            raise InventoryError(f"A node cannot offer {self.count} CPU slots: give --slots 0 or more.")
        return Inventory(
            cpus=float(self.count) if self.cpus is None else self.cpus,
            memory_bytes=machine_memory_bytes() if self.memory_bytes is None else self.memory_bytes,
            gpus=tuple(
                GPU(index=index, uuid=f"cpu-slot-{index}", kind=KIND_CPU_SLOT, model=CPU_SLOT_MODEL)
                for index in range(self.count)
            ),
        )


@dataclass(frozen=True, kw_only=True)
class NvmlGPUs:
    """Offers the GPUs that the driver knows of and `visible` admits, with links and NUMA nodes."""

    nvml: Nvml
    cpus: float | None = None
    """Cores to offer; None: all."""
    visible: str | None = None
    """The agent's own CUDA_VISIBLE_DEVICES; None: not set, every device is offered."""
    pci_devices: Path = PCI_DEVICES

    def read(self) -> Inventory:
        """The devices as they are now. Raises InventoryError."""
        try:
            found = self.nvml.devices()
        except NvmlError as error:
            raise InventoryError(
                f"The GPUs of this node cannot be read ({error}): see whether nvidia-smi lists them."
            ) from error
        gpus = [
            GPU(
                index=device.index,
                uuid=device.uuid,
                model=device.model,
                memory_bytes=device.memory_bytes,
                link_group=device.link_group,
                numa_node=numa_node_of(device.pci_bus_id, self.pci_devices),
            )
            for device in found
        ]
        return Inventory(
            cpus=float(os.cpu_count() or 1) if self.cpus is None else self.cpus,
            memory_bytes=machine_memory_bytes(),
            gpus=visible_gpus(gpus, self.visible),
        )


@dataclass(frozen=True, kw_only=True)
class RecordedGPUs:
    """Offers devices of a recorded sample, as a machine with them would: for tests, and for trying out placement."""

    inventory: Inventory
    visible: str | None = None
    """The agent's own CUDA_VISIBLE_DEVICES; None: not set, every device is offered."""

    @classmethod
    def from_file(cls, path: Path, *, visible: str | None) -> RecordedGPUs:
        """Read a JSON sample `{"cpus", "memory_bytes", "gpus": [GPU fields]}`. Raises InventoryError."""
        try:
            sample = json.loads(path.read_text(encoding="utf-8"))
            return cls(inventory=decode(Inventory, sample), visible=visible)
        except (OSError, ValueError) as error:
            raise InventoryError(
                f"The recorded inventory {path} cannot be read ({error}): give a JSON object with cpus, memory_bytes "
                "and gpus, each with index, uuid and model."
            ) from error

    def read(self) -> Inventory:
        """The recorded devices that `visible` admits, in its order."""
        return Inventory(
            cpus=self.inventory.cpus,
            memory_bytes=self.inventory.memory_bytes,
            gpus=visible_gpus(self.inventory.gpus, self.visible),
        )


def visible_gpus(gpus: Sequence[GPU], visible: str | None) -> tuple[GPU, ...]:
    """The devices that a preset CUDA_VISIBLE_DEVICES admits, in its order. Pure.

    As CUDA reads it: unset (None) admits all, an empty value none, `-1` ends the list; entries are ids, unambiguous
    beginnings of ids, or indexes. Unlike CUDA, which silently hides devices behind a mistake, an unknown, ambiguous or
    repeated entry raises InventoryError.
    """
    if visible is None:
        return tuple(gpus)
    admitted: list[GPU] = []
    for entry in (part.strip() for part in visible.split(",") if part.strip()):
        if entry == "-1":
            break
        device = _device_named(gpus, entry, visible)
        if device in admitted:
            raise InventoryError(f"CUDA_VISIBLE_DEVICES={visible!r} names {device.uuid} twice: name each device once.")
        admitted.append(device)
    return tuple(admitted)


def _device_named(gpus: Sequence[GPU], entry: str, visible: str) -> GPU:
    # An exact id wins over an index, since a plain number may itself be the id.
    exact = [gpu for gpu in gpus if gpu.uuid == entry]
    by_index = [gpu for gpu in gpus if entry.isascii() and entry.isdecimal() and gpu.index == int(entry)]
    by_beginning = [gpu for gpu in gpus if not entry.isdecimal() and gpu.uuid.startswith(entry)]
    found = exact or by_index or by_beginning
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{gpu.index}: {gpu.uuid}" for gpu in gpus) or "none"
    problem = "fits several devices" if found else "is no device of this node"
    raise InventoryError(
        f"{entry!r} in CUDA_VISIBLE_DEVICES={visible!r} {problem}: unset it, or name devices of this node ({known})."
    )


def numa_node_of(pci_bus_id: str, pci_devices: Path = PCI_DEVICES) -> int | None:
    """The NUMA node that a PCI device hangs on, from the kernel; None where it does not say (it writes -1)."""
    try:
        number = int((pci_devices / pci_bus_id / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None


def machine_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Physical memory of this machine in bytes, from the kernel. Raises InventoryError where it cannot be read."""
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name == "MemTotal":
                return int(rest.split()[0]) * 1024  # the kernel counts in KiB
    except (OSError, ValueError) as error:
        raise InventoryError(f"The machine's memory cannot be read from {meminfo}: {error}.") from error
    raise InventoryError(f"{meminfo} has no line MemTotal: the machine's memory is unknown.")
