"""GPUs as NVML tells of them, played from a recording: inventory with links and NUMA nodes, and utilisation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.recorded_nvml import RecordedNvml
from tests.support.wait import wait_until
from worker import __main__ as command
from worker.gpu_use import GPUUse, NoMeter, NvmlMeter, SlotMeter, meter_for
from worker.inventory import GPU, InventoryError, NvmlGPUs, numa_node_of
from worker.nvml import LIBRARY, Nvml, NvmlError

SAMPLE = Path(__file__).parent / "samples" / "nvml-mixed.json"
H100 = "NVIDIA H100 80GB HBM3"
LOST_GPU, OLD_DRIVER, NOT_LOADED = 15, 18, 9


@pytest.fixture
def library() -> RecordedNvml:
    return RecordedNvml(SAMPLE)


@pytest.fixture
def pci(tmp_path: Path) -> Path:
    """The kernel's list of PCI devices: two of the GPUs are on NUMA nodes, one is on none."""
    for bus, node in (("1b", "0"), ("43", "1"), ("53", "-1")):
        (tmp_path / f"0000:{bus}:00.0").mkdir()
        (tmp_path / f"0000:{bus}:00.0" / "numa_node").write_text(f"{node}\n")
    return tmp_path


def offered(library: RecordedNvml, pci: Path, visible: str | None = None) -> tuple[GPU, ...]:
    return NvmlGPUs(nvml=Nvml(library), visible=visible, pci_devices=pci).read().gpus


# --- Inventory -------------------------------------------------------------------------------------------------------


def test_gpus_come_in_the_drivers_order_with_model_memory_links_and_numa_node(library: RecordedNvml, pci: Path) -> None:
    first, second, third, *_ = offered(library, pci)

    assert first == GPU(
        index=0,
        uuid="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        model=H100,
        memory_bytes=85520809984,
        link_group="0",
        numa_node=0,
    )
    assert [gpu.numa_node for gpu in (second, third)] == [1, None]


def test_gpus_that_reach_each_other_over_nvlink_even_over_others_are_one_group_and_a_lone_one_is_in_none(
    library: RecordedNvml, pci: Path
) -> None:
    assert [gpu.link_group for gpu in offered(library, pci)] == ["0", "0", "0", None, None, None]
    library.links = {(0, 2), (1, 4), (2, 4)}
    assert [gpu.link_group for gpu in offered(library, pci)] == ["0", "0", "0", None, None, "0"]
    library.links = {(0, 4), (1, 2)}
    assert [gpu.link_group for gpu in offered(library, pci)] == ["0", "1", "1", None, None, "0"]


def test_a_split_gpu_is_offered_as_its_instances(library: RecordedNvml, pci: Path) -> None:
    split = offered(library, pci)[3:5]

    assert [gpu.uuid[:8] for gpu in split] == ["MIG-b2c4", "MIG-0d3d"]
    assert [gpu.memory_bytes for gpu in split] == [5100273664, 10468982784]


def test_a_gpu_that_is_lost_is_left_out_and_the_others_keep_their_indexes(library: RecordedNvml, pci: Path) -> None:
    library.lost = {1}

    assert [gpu.index for gpu in offered(library, pci)] == [0, 2, 3, 4, 5]
    assert [gpu.link_group for gpu in offered(library, pci)[:2]] == [None, None]


def test_cuda_visible_devices_admits_gpus_as_for_a_recorded_inventory(library: RecordedNvml, pci: Path) -> None:
    assert [gpu.index for gpu in offered(library, pci, "2,GPU-8932f937-d7")] == [2, 0]


def test_a_driver_without_the_newer_functions_is_read_all_the_same(library: RecordedNvml, pci: Path) -> None:
    library.failing = {"nvmlDeviceGetP2PStatus": 13, "nvmlDeviceGetMigMode": 13}

    assert [(gpu.index, gpu.link_group) for gpu in offered(library, pci)] == [(index, None) for index in range(5)]


@pytest.mark.parametrize("bus", ["0000:1b:00.0", "0000:53:00.0", "0000:99:00.0"])
def test_a_numa_node_is_what_the_kernel_says_or_unknown(pci: Path, bus: str) -> None:
    assert numa_node_of(bus, pci) == {"0000:1b:00.0": 0}.get(bus)


def test_what_the_driver_refuses_is_said_with_the_call_and_the_fix(library: RecordedNvml, pci: Path) -> None:
    nvml = Nvml(library)
    library.failing = {"nvmlDeviceGetCount_v2": OLD_DRIVER}
    with pytest.raises(InventoryError, match=r"nvmlDeviceGetCount_v2: .*different versions.*nvidia-smi"):
        NvmlGPUs(nvml=nvml, pci_devices=pci).read()
    library.failing = {"nvmlInit_v2": NOT_LOADED}
    with pytest.raises(NvmlError, match="driver is not loaded"):
        Nvml(library)


# --- What an agent offers --------------------------------------------------------------------------------------------


def agent_offers(monkeypatch: pytest.MonkeyPatch, library: RecordedNvml | None, *options: str) -> set[str]:
    """The kinds of devices that an agent with these options would offer on a machine with this library, or none."""

    def load(name: str) -> RecordedNvml:
        assert name == LIBRARY
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr("worker.nvml.ctypes.CDLL", load)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    parsed = command._parser().parse_args(["agent", "--data", "x", *options])
    return {gpu.kind for gpu in command._inventory(parsed, command._open_nvml(parsed)).read().gpus}


def test_an_agent_offers_gpus_where_there_are_some_and_cpu_slots_where_there_are_none_or_when_told(
    monkeypatch: pytest.MonkeyPatch, library: RecordedNvml
) -> None:
    assert agent_offers(monkeypatch, library) == {"gpu"}
    assert agent_offers(monkeypatch, library, "--slots", "2") == {"cpu_slot"}
    assert agent_offers(monkeypatch, None) == {"cpu_slot"}
    library.devices = []
    assert agent_offers(monkeypatch, library) == {"cpu_slot"}


def test_a_driver_that_does_not_answer_is_no_reason_to_offer_cpu_slots_silently(
    monkeypatch: pytest.MonkeyPatch, library: RecordedNvml
) -> None:
    library.failing = {"nvmlInit_v2": NOT_LOADED}
    with pytest.raises(InventoryError, match=r"driver is not loaded.*--slots"):
        agent_offers(monkeypatch, library)
    assert agent_offers(monkeypatch, library, "--slots", "1") == {"cpu_slot"}


# --- Use -------------------------------------------------------------------------------------------------------------


def meter(library: RecordedNvml, pci: Path) -> NvmlMeter:
    nvml = Nvml(library)
    gpus = NvmlGPUs(nvml=nvml, visible="1,2,4,GPU-8932f937-d7", pci_devices=pci).read().gpus
    found = meter_for(gpus, nvml, pci)
    assert isinstance(found, NvmlMeter)
    return found


def test_use_is_a_share_of_time_and_bytes_of_the_gpus_offered_and_an_instance_has_none(
    library: RecordedNvml, pci: Path
) -> None:
    assert meter(library, pci).look() == (
        GPUUse(index=0, utilisation=0.97, memory_bytes=71940702208),
        GPUUse(index=1, utilisation=1.0, memory_bytes=71940702208),
        GPUUse(index=2, utilisation=0.0, memory_bytes=0),
    )


def test_a_lost_gpu_says_nothing_and_the_others_still_do(library: RecordedNvml, pci: Path) -> None:
    found = meter(library, pci)
    library.lost = {1}
    assert [use.index for use in found.look()] == [0, 2]
    library.failing = {"nvmlDeviceGetUtilizationRates": LOST_GPU}
    assert found.look() == ()


def test_a_driver_that_is_gone_is_logged_once_and_use_is_unknown(
    library: RecordedNvml, pci: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = meter(library, pci)
    library.failing = {"nvmlDeviceGetCount_v2": OLD_DRIVER}
    assert [found.look(), found.look()] == [(), ()]
    assert capsys.readouterr().err.count("gpu_use_unknown") == 1


def test_a_heartbeat_never_waits_for_nvml_and_gets_the_look_that_the_one_before_asked_for(
    library: RecordedNvml, pci: Path
) -> None:
    found = meter(library, pci)
    assert found.read(0.0) == ()
    wait_until(lambda: found._latest, 10, "the look that was asked for is not done")

    assert [use.index for use in found.read(2.0)] == [0, 1, 2]


def test_recorded_devices_have_no_use_and_cpu_slots_a_meter_of_their_own(library: RecordedNvml, pci: Path) -> None:
    gpus = offered(library, pci)
    assert isinstance(meter_for(gpus, None, pci), NoMeter)
    slots = tuple(GPU(index=i, uuid=f"cpu-slot-{i}", kind="cpu_slot", model="CPU slot") for i in range(2))
    assert isinstance(meter_for(slots, None, pci), SlotMeter)
    assert isinstance(meter_for((), None, pci), NoMeter)
