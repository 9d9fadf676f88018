"""A train step compiled ahead of time for devices that need not exist: memory, traffic, roofline."""

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ncp_jax.config import ConfigError
from ncp_jax.parallel.rules import activation_rules, batch_sharding, row_sharding
from ncp_jax.plan.chips import Chip
from ncp_jax.plan.hlo import Traffic, largest, traffic
from ncp_jax.plan.step import Step
from ncp_jax.train.run_config import RunConfig

# Share of the peak that the TPU compiler itself assumes for large matrix products and for HBM streams (its per-op cost
# model on v5p: 394 of 459 TFLOP/s, 2.35 of 2.77 TB/s).
MATMUL_SHARE, HBM_SHARE = 0.86, 0.85
# How hard the compiler tries. quick: its least, a fifth of the time, and temporaries within 2 % (LOG.md);
# full: as a training run compiles.
Effort = Literal["quick", "full"]
_LEVEL = {"quick": -1.0, "full": 0.0}
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
    dcn: float  # between slices

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
    largest: list[tuple[str, int]]  # arrays that the step makes: (what computes it, bytes)
    optimal_seconds: float | None  # the compiler's own sum over operations; wrong where there are loops


def compile_step(step: Step, effort: Effort = "quick") -> Compiled:
    """Compile the real train step (model, remat, loss, optimizer, donation) for its slice."""
    program, where = step.program, step.where
    began = time.monotonic()
    with jax.set_mesh(program.mesh), nn.logical_axis_rules(activation_rules()), _effort(effort):
        lowered = program.train_step.trace(*program.like, abstract_batch(step.config, program.mesh)).lower()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            excess = _excess(str(error))
            if excess is None:
                raise
            return Compiled(None, None, time.monotonic() - began, excess, [], None)
    seconds = time.monotonic() - began
    text, memory = compiled.as_text(), _memory(compiled.memory_analysis())
    excess = max(0, memory.peak - int(where.chip.hbm))
    return Compiled(memory, traffic(text), seconds, excess, largest(text), _optimal_seconds(compiled, text))


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

    Collectives within a slice are costed at the chip's whole bandwidth to other chips, those between slices at its
    share of the network: a gathered or exchanged result once, a reduced result twice.
    """
    wire, network = (
        sum(size * (2 if kind == "all-reduce" else 1) for kind, size in sizes.items())
        for sizes in (moved.collective_bytes, moved.slice_bytes)
    )
    return Roofline(
        flops / (MATMUL_SHARE * chip.flops), moved.hbm_bytes / (HBM_SHARE * chip.hbm_bandwidth),
        wire / chip.ici_bandwidth, network / chip.dcn_bandwidth,
    )  # fmt: skip


@contextlib.contextmanager
def _effort(effort: Effort) -> Iterator[None]:
    name = "jax_exec_time_optimization_effort"
    before = getattr(jax.config, name)
    jax.config.update(name, _LEVEL[effort])
    try:
        yield
    finally:
        jax.config.update(name, before)


def _optimal_seconds(compiled: Any, text: str) -> float | None:
    cost = compiled.cost_analysis() or {}
    if "optimal_seconds" not in cost:
        return None
    # Each ConcatBitcast is scored as minus one second.
    return float(cost["optimal_seconds"]) + text.count('custom_call_target="ConcatBitcast"')


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
