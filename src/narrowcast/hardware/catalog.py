"""GPUs by name, to plan for a device that this machine does not have. Figures of data sheets."""

from dataclasses import dataclass

from narrowcast.errors import ConfigError
from narrowcast.hardware.detect import Hardware, gpu_hardware

GPUS_PER_NODE = 8
"""GPUs of one machine, between which the fast link runs."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as its data sheet describes it."""

    name: str
    """As the driver reports it, so that shipped measurements are found."""
    memory_gib: float
    capability: tuple[int, int]
    link_rate: float
    """GB/s in one direction to the other GPUs of the machine: NVLink, or PCIe without it."""
    network_rate: float = 50.0
    """GB/s in one direction to other machines, per GPU: one 400 Gbit/s adapter each."""


GPUS = {
    "a100": Gpu(name="NVIDIA A100-SXM4-80GB", memory_gib=80, capability=(8, 0), link_rate=300,
                network_rate=25),
    "h100": Gpu(name="NVIDIA H100 80GB HBM3", memory_gib=80, capability=(9, 0), link_rate=450),
    "h200": Gpu(name="NVIDIA H200", memory_gib=140, capability=(9, 0), link_rate=450),
    "b200": Gpu(name="NVIDIA B200", memory_gib=180, capability=(10, 0), link_rate=900),
    "l4": Gpu(name="NVIDIA L4", memory_gib=22, capability=(8, 9), link_rate=32, network_rate=12.5),
    "l40s": Gpu(name="NVIDIA L40S", memory_gib=45, capability=(8, 9), link_rate=32,
                network_rate=12.5),
    "rtx4090": Gpu(name="NVIDIA GeForce RTX 4090", memory_gib=24, capability=(8, 9), link_rate=32,
                   network_rate=12.5),
}  # fmt: skip
"""Usable memory is slightly below the figure on the box, as the driver reports it."""


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its short name."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ConfigError(
            f"hardware must be one of {', '.join(GPUS)}, got {name!r}. Leave hardware out to plan "
            "for this machine."
        )
    return gpu


def find_data_sheet(hardware: Hardware) -> Gpu | None:
    """Return the entry of a device, if it is in the list."""
    return next((each for each in GPUS.values() if hardware.name.startswith(each.name)), None)


def named_hardware(name: str) -> Hardware:
    """Return the hardware to plan for, by the short name of a GPU."""
    gpu = find_gpu(name)
    memory = round(gpu.memory_gib * 2**30)
    return gpu_hardware("cuda:0", name=gpu.name, memory_bytes=memory, capability=gpu.capability)
