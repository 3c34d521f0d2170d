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


# Rates are dense: where a data sheet has them only "with sparsity", they are halved. They are those
# that NVIDIA publishes for the V100, T4, A100, L4, L40S, H100, H200 and HGX B200 (180 GB), and for
# the GeForce cards in the whitepapers of GA102 and Ada, mostly read in copies and comparisons. The
# 16-bit rates of the RTX 3090 have no such source. Products of GeForce cards in 16 bits and fp8 run
# at half rate when they add in fp32, as training does. The T4's bandwidth is that of its memory
# clock; its data sheet rounds to 300.
_HOPPER = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}
_AMPERE = {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}
GPUS = {
    "v100": Gpu(name="Tesla V100-SXM2-32GB", memory_gib=31.7, capability=(7, 0), link_rate=150,
                network_rate=12.5, tflops={"fp32": 15.7, "fp16": 125}, bandwidth=900),
    "t4": Gpu(name="Tesla T4", memory_gib=14.5, capability=(7, 5), link_rate=16,
              network_rate=12.5, tflops={"fp32": 8.1, "fp16": 65}, bandwidth=320),
    "a100-40gb": Gpu(name="NVIDIA A100-SXM4-40GB", memory_gib=39.4, capability=(8, 0),
                     link_rate=300, network_rate=25, tflops=_AMPERE, bandwidth=1555),
    "a100": Gpu(name="NVIDIA A100-SXM4-80GB", memory_gib=79.1, capability=(8, 0), link_rate=300,
                network_rate=25, tflops=_AMPERE, bandwidth=2039),
    "rtx3090": Gpu(name="NVIDIA GeForce RTX 3090", memory_gib=23.6, capability=(8, 6),
                   link_rate=32, network_rate=12.5,
                   tflops={"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71},
                   bandwidth=936),
    "h100": Gpu(name="NVIDIA H100 80GB HBM3", memory_gib=79.1, capability=(9, 0), link_rate=450,
                tflops=_HOPPER, bandwidth=3350),
    "h100-pcie": Gpu(name="NVIDIA H100 PCIe", memory_gib=79.1, capability=(9, 0), link_rate=64,
                     network_rate=25,
                     tflops={"fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756, "fp8": 1513},
                     bandwidth=2000),
    "h200": Gpu(name="NVIDIA H200", memory_gib=139.8, capability=(9, 0), link_rate=450,
                tflops=_HOPPER, bandwidth=4800),
    "b200": Gpu(name="NVIDIA B200", memory_gib=178, capability=(10, 0), link_rate=900,
                tflops={"fp32": 75, "tf32": 1100, "bf16": 2250, "fp16": 2250, "fp8": 4500},
                bandwidth=7700),
    "l4": Gpu(name="NVIDIA L4", memory_gib=22, capability=(8, 9), link_rate=32, network_rate=12.5,
              tflops={"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242.5},
              bandwidth=300),
    "l40s": Gpu(name="NVIDIA L40S", memory_gib=44.4, capability=(8, 9), link_rate=32,
                network_rate=12.5,
                tflops={"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733},
                bandwidth=864),
    "rtx4090": Gpu(name="NVIDIA GeForce RTX 4090", memory_gib=23.6, capability=(8, 9), link_rate=32,
                   network_rate=12.5,
                   tflops={"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
                   bandwidth=1008),
}  # fmt: skip
"""Usable memory is below the figure on the box. It is the total that torch reports for the T4, the
cards with 80 GB and the H200, and an estimate for the others."""


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
    """Return the entry of a device, if it is in the list: of this very name, not of a variant."""
    return next((each for each in GPUS.values() if hardware.name == each.name), None)


def named_hardware(name: str) -> Hardware:
    """Return the hardware to plan for, by the short name of a GPU."""
    gpu = find_gpu(name)
    memory = round(gpu.memory_gib * 2**30)
    return gpu_hardware("cuda:0", name=gpu.name, memory_bytes=memory, capability=gpu.capability)
