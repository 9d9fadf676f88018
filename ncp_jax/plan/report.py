"""What a plan says: one layout, or the Pareto set of several. Figures per chip; the conventions stand beside them."""

from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from ncp_jax.plan.chips import Slice
from ncp_jax.plan.compiled import HBM_SHARE, MATMUL_SHARE, Compiled, Effort, compile_step, roofline
from ncp_jax.plan.estimate import Estimate, estimate
from ncp_jax.plan.search import Candidate, candidates, pareto
from ncp_jax.plan.step import Step, step_on
from ncp_jax.train.run_config import RunConfig

GIB = 2**30
LARGEST = 3  # arrays named
CONVENTION = (
    f"roofline step: the longest of executed FLOPs at {MATMUL_SHARE:.0%} of the bf16 peak, HBM bytes at "
    f"{HBM_SHARE:.0%} of the bandwidth, and collectives at the inter-chip bandwidth, as if all overlapped; a bound, "
    "not a measurement. MFU: counted FLOPs (no recomputation) over the peak in that time"
)


def plan_one(config: RunConfig, where: Slice, effort: Effort | None) -> dict[str, Any]:
    """Print and return the plan of one layout. Without an effort nothing is compiled."""
    step = step_on(config, where, compiler=effort is not None)
    found = _figures(step, estimate(step), compile_step(step, effort) if effort else None)
    _show(found)
    return found


def plan_search(config: RunConfig, where: Slice, effort: Effort | None) -> dict[str, Any]:
    """Estimate many layouts, compile the best few, print those that no other beats in speed and memory."""
    found = candidates(config, where)
    if not found:
        guess = estimate(step_on(config, where, compiler=False))
        print(f"no layout of {config.name} is estimated to fit {where}; the config's own needs {_gb(guess.peak)}")
        return {"fits": False, "layouts": []}
    layouts = [_searched(one, effort) for one in found]
    fitting = [layout for layout in layouts if layout["fits"]]
    best = pareto([(layout["tokens_per_second_per_chip"], layout["hbm_peak"]) for layout in fitting])
    table = Table(title=f"{config.name} on {where}: layouts that no other beats")
    for column in ("layout", "HBM", "tokens/s/chip", "MFU"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for index in best:
        layout = fitting[index]
        speed, mfu = layout["tokens_per_second_per_chip"], layout["mfu"]
        table.add_row(layout["layout"], _gb(layout["hbm_peak"]), f"{speed:,.0f}", f"{mfu:.1%}")
    Console().print(table)
    print(CONVENTION)
    return {"fits": bool(fitting), "layouts": layouts, "pareto": [fitting[index]["layout"] for index in best]}


def _searched(one: Candidate, effort: Effort | None) -> dict[str, Any]:
    print(f"{'compiling' if effort else 'estimated'}: {one.describe()}", flush=True)
    step = one.step if effort is None else step_on(one.step.config, one.step.where, compiler=True)
    return _figures(step, one.estimate, compile_step(step, effort) if effort else None) | {"layout": one.describe()}


def _figures(step: Step, guess: Estimate, compiled: Compiled | None) -> dict[str, Any]:
    config, where, task = step.config, step.where, step.task
    chip, counted = where.chip, task.flops_per_token * config.tokens_per_step / where.chips
    found: dict[str, Any] = {
        "config": config.name, "topology": str(where), "chips": where.chips, "mesh": config.mesh.describe(),
        "rows": config.train.batch, "micro_batches": config.train.micro_batches, "sequence": config.data.sequence,
        "tokens_per_step": config.tokens_per_step, "flops_per_token": task.flops_per_token,
        "flops_convention": task.flops_convention, "hbm": int(chip.hbm), "estimate": guess._asdict(),
        "jax": jax.__version__, "compiled": compiled is not None, "largest_arguments": step.arguments()[:LARGEST],
    }  # fmt: skip
    seconds, peak = guess.step, guess.peak
    if compiled is not None:
        found |= {
            "compile_seconds": compiled.seconds_to_compile, "excess": compiled.excess,
            "largest_made": compiled.largest[:LARGEST],
        }  # fmt: skip
        peak = int(chip.hbm) + compiled.excess if compiled.memory is None else compiled.memory.peak
        if compiled.memory is not None and compiled.traffic is not None:
            limits = roofline(step.flops_per_chip, compiled.traffic, chip)
            seconds = limits.step
            found |= {
                "memory": compiled.memory._asdict(), "traffic": compiled.traffic._asdict(),
                "roofline": limits._asdict() | {"limit": limits.limit}, "optimal_seconds": compiled.optimal_seconds,
            }  # fmt: skip
    return found | {
        "hbm_peak": peak, "fits": peak <= chip.hbm, "step_seconds": seconds,
        "tokens_per_second_per_chip": config.tokens_per_step / where.chips / seconds,
        "mfu": counted / seconds / chip.flops,
    }  # fmt: skip


def _show(found: dict[str, Any]) -> None:
    how = f"compiled in {found['compile_seconds']:.0f} s (jax {found['jax']})" if found["compiled"] else "estimated"
    print(f"{found['config']} on {found['topology']}, {how}")
    print(
        f"mesh {found['mesh']}; {found['rows']} rows of {found['sequence']:,} tokens in {found['micro_batches']} parts"
    )
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _lines(found):
        table.add_row(name, value)
    Console().print(table)
    print(CONVENTION)


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    guess, peak, hbm = found["estimate"], found["hbm_peak"], found["hbm"]
    verdict = "fits" if found["fits"] else f"does NOT fit: {_gb(peak - hbm)} too much"
    lines = [("HBM per chip", f"{_gb(peak)} of {_gb(hbm)}: {verdict}")]
    if "memory" in found:
        memory = found["memory"]
        parts = ", ".join(f"{name} {_gb(memory[name])}" for name in ("arguments", "temporaries", "code"))
        lines.append(("  compiled", parts))
    names = ("arguments", "gradients", "activations")
    lines.append(("  estimate", ", ".join(f"{name} {_gb(guess[name])}" for name in names)))
    for label, arrays in (("  largest kept", "largest_arguments"), ("  largest made", "largest_made")):
        lines += [(label, f"{_gb(size)} {name}") for name, size in found.get(arrays, [])]
    if "traffic" in found:
        moved = found["traffic"]
        lines.append(("HBM traffic", _gb(moved["hbm_bytes"])))
        for kind, size in sorted(moved["collective_bytes"].items(), key=lambda pair: -pair[1]):
            lines.append((f"  {kind}", f"{moved['collective_count'][kind]:,.0f} x, {_gb(size)}"))
        lines += [(f"  {kind}", f"{_gb(size)} between slices") for kind, size in sorted(moved["slice_bytes"].items())]
        limits = found["roofline"]
        times = ", ".join(f"{name} {1e3 * limits[name]:,.1f} ms" for name in ("compute", "hbm", "ici", "dcn"))
        lines.append(("roofline", f"{times}: limited by {limits['limit']}"))
    speed = found["tokens_per_second_per_chip"]
    lines.append(("step", f"{1e3 * found['step_seconds']:,.1f} ms, {speed:,.0f} tokens/s/chip, MFU {found['mfu']:.1%}"))
    return lines


def _gb(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"
