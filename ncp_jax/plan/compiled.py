"""A train step compiled ahead of time for devices that need not exist: memory, traffic, roofline."""

import re
import time
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ncp_jax.config import ConfigError
from ncp_jax.parallel.mesh import make_mesh
from ncp_jax.parallel.rules import activation_rules, batch_sharding, row_sharding
from ncp_jax.plan.chips import Chip, Slice, devices
from ncp_jax.plan.hlo import Traffic, traffic
from ncp_jax.train.families import build_task
from ncp_jax.train.program import Program, make_program
from ncp_jax.train.run_config import RunConfig

# Share of the peak that the TPU compiler itself assumes for large matrix products and for HBM streams (its per-op cost
# model on v5p: 394 of 459 TFLOP/s, 2.35 of 2.77 TB/s).
MATMUL_SHARE, HBM_SHARE = 0.86, 0.85
_EXCEEDED = re.compile(
    r"Used ([\d.]+[KMGT]) of ([\d.]+[KMGT]) hbm|([\d.]+[KMGT]) exceeds available HBM \(([\d.]+[KMGT])\)"
)
_SUFFIX = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Memory(NamedTuple):
    """HBM bytes per chip. `peak` = arguments + temporaries + results that alias no argument + code."""

    arguments: int
    temporaries: int
    code: int
    peak: int


class Roofline(NamedTuple):
    """Seconds per step if each resource were the only limit. The step takes at least the longest."""

    compute: float
    hbm: float
    ici: float

    @property
    def step(self) -> float:
        return max(self)

    @property
    def limit(self) -> str:
        return self._fields[self.index(max(self))]


class Compiled(NamedTuple):
    """What the compiler says of one train step. `excess` bytes are missing where it does not fit; then no `traffic`."""

    memory: Memory | None
    traffic: Traffic | None
    seconds_to_compile: float
    excess: int
    optimal_seconds: float | None  # the compiler's own sum over operations; wrong where there are loops


def compile_step(config: RunConfig, where: Slice) -> Compiled:
    """Compile the real train step (model, remat, loss, optimizer, donation) of `config` for a slice.

    Raises ConfigError where the compiler is absent, or for sizes that do not divide over the mesh.
    """
    mesh = make_mesh(config.mesh, devices(where))
    task = build_task(config.model, config.data.sequence, jnp.bfloat16, platform="tpu")
    program = make_program(config, task, mesh)
    began = time.monotonic()
    with jax.set_mesh(mesh), nn.logical_axis_rules(activation_rules()):
        lowered = program.train_step.trace(*program.like, abstract_batch(config, mesh)).lower()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        excess = _excess(str(error))
        if excess is None:
            raise
        return Compiled(None, None, time.monotonic() - began, excess, None)
    seconds = time.monotonic() - began
    text = compiled.as_text()
    memory = _memory(compiled.memory_analysis())
    cost = compiled.cost_analysis() or {}
    corrected = None
    if "optimal_seconds" in cost:  # each ConcatBitcast is scored as minus one second
        corrected = float(cost["optimal_seconds"]) + text.count('custom_call_target="ConcatBitcast"')
    return Compiled(memory, traffic(text), seconds, max(0, memory.peak - int(where.chip.hbm)), corrected)


def abstract_batch(config: RunConfig, mesh: Mesh) -> dict[str, Any]:
    """The batch of a train step as ShapeDtypeStructs with their shardings (data/packing.py)."""
    B, T = config.train.batch, config.data.sequence
    names: dict[str, Any] = {"tokens": jnp.int32, "targets": jnp.int32, "real": jnp.bool_, "scored": jnp.bool_}
    if config.data.packing == "documents":
        names |= {"segments": jnp.int32, "positions": jnp.int32}
    tokens = {name: jax.ShapeDtypeStruct((B, T), kind, sharding=batch_sharding(mesh)) for name, kind in names.items()}
    return tokens | {"bytes": jax.ShapeDtypeStruct((B,), jnp.int32, sharding=row_sharding(mesh))}


def roofline(flops: float, moved: Traffic, chip: Chip) -> Roofline:
    """`flops` per chip and step, recomputation included.

    Collectives are costed at the chip's whole inter-chip bandwidth: a gathered or exchanged result once, a reduced
    result twice. Traffic between slices is not costed apart.
    """
    wire = sum(size * (2 if kind == "all-reduce" else 1) for kind, size in moved.collective_bytes.items())
    return Roofline(
        flops / (MATMUL_SHARE * chip.flops), moved.hbm_bytes / (HBM_SHARE * chip.hbm_bandwidth),
        wire / chip.ici_bandwidth,
    )  # fmt: skip


def recompute_factor(config: RunConfig) -> float:
    """Executed over counted FLOPs: a block that keeps nothing runs its forward pass twice (4/3)."""
    backbone = getattr(config.model, "backbone", None)
    return 4 / 3 if getattr(backbone, "remat", "none") == "block" else 1.0


def largest(program: Program, count: int = 5) -> list[tuple[str, int]]:
    """The largest arguments of the step, bytes per device."""
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(program.like)[0]:
        shard = leaf.sharding.shard_shape(leaf.shape)
        size = leaf.dtype.itemsize
        for side in shard:
            size *= side
        found.append((jax.tree_util.keystr(path, simple=True, separator="/"), size))
    return sorted(found, key=lambda pair: -pair[1])[:count]


def _memory(found: Any) -> Memory:
    arguments, code = int(found.argument_size_in_bytes), int(found.generated_code_size_in_bytes)
    temporaries = int(found.temp_size_in_bytes)
    fresh = int(found.output_size_in_bytes) - int(found.alias_size_in_bytes)
    return Memory(arguments, temporaries, code, arguments + temporaries + max(fresh, 0) + code)


def _excess(message: str) -> int | None:
    found = _EXCEEDED.search(message)
    if found is None:
        if "RESOURCE_EXHAUSTED" in message:
            raise ConfigError(f"the compiler ran out of memory on the chip: {message[:400]}")
        return None
    used, available = (found[1], found[2]) if found[1] else (found[3], found[4])
    return int(_bytes(used) - _bytes(available))


def _bytes(text: str) -> float:
    return float(text[:-1]) * _SUFFIX[text[-1]]
