"""TPU chips and slices: what a chip has, which slices exist, and their devices without any hardware.

Figures per chip from the vendor's data sheets (docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e): HBM, dense bf16
FLOP/s, HBM bandwidth, inter-chip bandwidth (all links together, one way), and a chip's share of the network between
slices (per chip for v5p; for v5e and v6e the pod's over 256 chips; v4's is not stated there: v5p's is assumed).
"""

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from ncp_jax.config import ConfigError
from ncp_jax.train.throughput import PEAK_FLOPS

GB = 1e9
# What the TPU compiler reads of the machine it runs on; without these it looks for a TPU VM's metadata server.
OFFLINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling takes no lock, so it neither blocks nor is blocked by a live job
}


class Chip(NamedTuple):
    """One chip. `flops` FLOP/s in bf16; bandwidths bytes/s; `dims` of its torus; `most` chips in a slice."""

    hbm: float
    flops: float
    hbm_bandwidth: float
    ici_bandwidth: float
    dcn_bandwidth: float
    dims: int
    most: int


CHIPS = {
    "v4": Chip(32 * 2**30, PEAK_FLOPS["TPU v4"], 1228 * GB, 300 * GB, 6.25 * GB, 3, 4096),
    "v5e": Chip(16 * 2**30, PEAK_FLOPS["TPU v5e"], 819 * GB, 200 * GB, 3.125 * GB, 2, 256),
    "v5p": Chip(95 * 2**30, PEAK_FLOPS["TPU v5p"], 2765 * GB, 600 * GB, 6.25 * GB, 3, 8960),
    "v6e": Chip(32 * 2**30, PEAK_FLOPS["TPU v6e"], 1640 * GB, 400 * GB, 12.5 * GB, 2, 256),
}
# 2-D slices are these; 3-D slices are boxes with sides from this list (sides above 4 are whole cubes of 4).
SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL_BOXES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")


class Slice(NamedTuple):
    """A kind of chip and the shape of a slice of them, for example v5p 4x4x4; `slices` of these."""

    kind: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def chips(self) -> int:
        return math.prod(self.shape) * self.slices

    def __str__(self) -> str:
        box = "x".join(map(str, self.shape))
        return f"{self.kind}:{box}" if self.slices == 1 else f"{self.slices} x {self.kind}:{box}"


def parse(topology: str, slices: int = 1) -> Slice:
    """`v5p:4x4x4` as a Slice. Raises ConfigError for one that does not exist, listing those that do."""
    kind, _, box = topology.partition(":")
    if kind not in CHIPS:
        raise ConfigError(f"topology '{topology}': no chip '{kind}'; known: {', '.join(CHIPS)}, as in v5p:2x2x4")
    chip, words = CHIPS[kind], box.split("x")
    shape = tuple(int(word) for word in words if word.isdigit())
    if len(shape) != len(words) or not _exists(chip, shape):
        raise ConfigError(f"topology '{topology}' does not exist; {kind} has {_examples(chip)}")
    if slices < 1:
        raise ConfigError(f"--slices {slices}: at least one")
    return Slice(kind, shape, slices)


def devices(where: Slice) -> Sequence[Any]:
    """The slice's devices, for compiling only. Raises ConfigError where the TPU compiler is missing or refuses."""
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": where.slices} if where.slices > 1 else {}
    if where.kind == "v4":
        options["chip_config_name"] = "megacore"  # one device per chip
    if math.prod(where.shape) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = f"{where.kind}:{'x'.join(map(str, where.shape))}"
    try:
        return topologies.get_topology_desc(name, "tpu", **options).devices
    except Exception as error:  # the plugin raises its own kinds
        if has_compiler():
            raise ConfigError(f"the TPU compiler refuses {name}: {error}") from None
        raise ConfigError(
            "the TPU compiler is not installed (package libtpu); pip install 'ncp-jax[tpu]', or use --analytic"
        ) from None


def has_compiler() -> bool:
    """Whether libtpu is installed."""
    import importlib.util

    return importlib.util.find_spec("libtpu") is not None


def _exists(chip: Chip, shape: tuple[int, ...]) -> bool:
    if len(shape) != chip.dims or math.prod(shape) > chip.most:
        return False
    box = "x".join(map(str, shape))
    if chip.dims == 2:
        return box in SQUARES
    return box in SMALL_BOXES or (all(side % 4 == 0 for side in shape) and list(shape) == sorted(shape))


def _examples(chip: Chip) -> str:
    if chip.dims == 2:
        return ", ".join(SQUARES)
    return f"{', '.join(SMALL_BOXES)}, and boxes of sides that are multiples of 4, smallest first, such as 4x4x4, 4x4x8"
