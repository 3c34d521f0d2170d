"""GPUs by name, to plan for a device that this machine does not have. Figures of data sheets."""

from collections.abc import Mapping
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
    tflops: Mapping[str, float]
    """Peak rate of dense matrix products in TFLOP per second, by format."""
    bandwidth: float
    """GB/s to the GPU's own memory."""


_HOPPER = {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}
GPUS = {
    "a100": Gpu(name="NVIDIA A100-SXM4-80GB", memory_gib=80, capability=(8, 0), link_rate=300,
                network_rate=25,
                tflops={"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
                bandwidth=2039),
    "h100": Gpu(name="NVIDIA H100 80GB HBM3", memory_gib=80, capability=(9, 0), link_rate=450,
                tflops=_HOPPER, bandwidth=3350),
    "h200": Gpu(name="NVIDIA H200", memory_gib=140, capability=(9, 0), link_rate=450,
                tflops=_HOPPER, bandwidth=4800),
    "b200": Gpu(name="NVIDIA B200", memory_gib=180, capability=(10, 0), link_rate=900,
                tflops={"fp32": 75, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500},
                bandwidth=8000),
    "l4": Gpu(name="NVIDIA L4", memory_gib=22, capability=(8, 9), link_rate=32, network_rate=12.5,
              tflops={"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5},
              bandwidth=300),
    "l40s": Gpu(name="NVIDIA L40S", memory_gib=45, capability=(8, 9), link_rate=32,
                network_rate=12.5,
                tflops={"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733},
                bandwidth=864),
    "rtx4090": Gpu(name="NVIDIA GeForce RTX 4090", memory_gib=24, capability=(8, 9), link_rate=32,
                   network_rate=12.5,
                   tflops={"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
                   bandwidth=1008),
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
