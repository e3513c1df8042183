"""What a node offers: CPU slots, and exactly the devices that a preset CUDA_VISIBLE_DEVICES admits (bug case O-36)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gangline.protocol.launch import encode
from worker.inventory import (
    GPU,
    CpuSlots,
    Inventory,
    InventoryError,
    RecordedGPUs,
    machine_memory_bytes,
    visible_gpus,
)

SAMPLE = Path(__file__).parent / "samples" / "inventory-mixed.json"
GPU_0 = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
GPU_1 = "GPU-8932f937-0a11-4a55-b0f4-6d1c7f2b1e07"
MIG_2 = "MIG-b2c4f9e0-52c3-5d6b-9a0a-8a7f0f4a1c11"


def uuids(gpus: tuple[GPU, ...]) -> list[str]:
    return [gpu.uuid for gpu in gpus]


def offered(visible: str | None) -> list[str]:
    return uuids(RecordedGPUs.from_file(SAMPLE, visible=visible).read().gpus)


def test_cpu_slots_stand_in_for_gpus_with_a_core_each() -> None:
    inventory = CpuSlots(count=3).read()

    assert uuids(inventory.gpus) == ["cpu-slot-0", "cpu-slot-1", "cpu-slot-2"]
    assert {gpu.kind for gpu in inventory.gpus} == {"cpu_slot"}
    assert inventory.cpus == 3.0
    assert inventory.memory_bytes == machine_memory_bytes() > 0


def test_cpus_and_memory_of_cpu_slots_can_be_given() -> None:
    inventory = CpuSlots(count=2, cpus=0.5, memory_bytes=1024).read()

    assert (inventory.cpus, inventory.memory_bytes) == (0.5, 1024)


def test_a_negative_number_of_slots_is_refused_with_the_fix() -> None:
    with pytest.raises(InventoryError, match="-1 CPU slots: give --slots 0 or more"):
        CpuSlots(count=-1).read()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [GPU_0, GPU_1, MIG_2, "3"]),
        ("", []),
        ("0", [GPU_0]),
        ("1,0", [GPU_1, GPU_0]),
        ("3", ["3"]),
        (f" {GPU_1} , {MIG_2} ", [GPU_1, MIG_2]),
        ("GPU-8932f937-0a", [GPU_1]),
        ("MIG-b2c4", [MIG_2]),
        ("0,-1,1", [GPU_0]),
        ("-1", []),
    ],
)
def test_only_the_preset_subset_is_offered_in_its_order_and_with_ids_as_given(
    visible: str | None, expected: list[str]
) -> None:
    assert offered(visible) == expected


@pytest.mark.parametrize(
    ("visible", "problem"),
    [
        ("7", "'7' .* is no device"),
        ("GPU-00000000", "'GPU-00000000' .* is no device"),
        ("GPU-8932f937", "fits several devices"),
        ("0,0", "twice"),
        (f"0,{GPU_0}", "twice"),
        ("zero", "'zero' .* is no device"),
    ],
)
def test_a_mistake_in_the_preset_is_refused_and_never_hides_devices_silently(visible: str, problem: str) -> None:
    with pytest.raises(InventoryError, match=problem):
        offered(visible)


def test_an_id_that_is_a_plain_number_wins_over_an_index() -> None:
    gpus = (GPU(index=0, uuid="1", model="x"), GPU(index=1, uuid="0", model="x"))

    assert uuids(visible_gpus(gpus, "1,0")) == ["1", "0"]


def test_a_sample_keeps_every_field_of_a_device() -> None:
    device = RecordedGPUs.from_file(SAMPLE, visible="1").read().gpus[0]

    assert device == GPU(
        index=1, uuid=GPU_1, model="NVIDIA H100 80GB HBM3", memory_bytes=85520809984, link_group="0", numa_node=1
    )


@pytest.mark.parametrize("content", ["", "[]", '{"cpus": 4}', '{"cpus": 4, "memory_bytes": 1, "gpus": [{"index": 0}]}'])
def test_a_sample_that_is_none_is_refused_with_the_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "sample.json"
    path.write_text(content)

    with pytest.raises(InventoryError, match=r"sample\.json cannot be read"):
        RecordedGPUs.from_file(path, visible=None)


def test_an_inventory_goes_over_the_wire_as_plain_json() -> None:
    inventory = Inventory(cpus=1.0, memory_bytes=2, gpus=(GPU(index=0, uuid="a", model="m"),))

    assert json.loads(json.dumps(encode(inventory)))["gpus"] == [
        {
            "index": 0,
            "uuid": "a",
            "kind": "gpu",
            "model": "m",
            "memory_bytes": 0,
            "link_group": None,
            "numa_node": None,
        }
    ]


def test_unreadable_machine_memory_is_an_error_and_not_a_guess(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemFree: 12 kB\n")

    with pytest.raises(InventoryError, match="no line MemTotal"):
        machine_memory_bytes(tmp_path / "meminfo")
