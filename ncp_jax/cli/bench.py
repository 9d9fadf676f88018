"""The `ncp-jax bench` subcommand: median step time, tokens per second, MFU and memory, configs side by side."""

import argparse
import json
from pathlib import Path

EXAMPLE = """examples:
  ncp-jax bench configs/ncp_nano.py
  ncp-jax bench configs/ncp_nano.py --vs configs/olmo3_nano.py --steps 30
  ncp-jax bench configs/ncp_190m.py train.batch=8 data.sequence=1024 --json bench.json

Random tokens, random weights (a frozen autoencoder's too); KEY=VALUE pairs change every config that is named."""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `bench`."""
    parser = subparsers.add_parser(
        "bench", help="time training steps", description=__doc__, epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", help="a Python file, or the name of one under configs/")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changed fields, such as train.batch=8")
    parser.add_argument("--vs", action="append", default=[], metavar="CONFIG", help="measure this one too; repeatable")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each (default: 20)")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    from ncp_jax.config import ConfigError, load, override
    from ncp_jax.train.bench import bench, machine

    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: at least one")
    configs = [override(load(name), args.overrides) for name in (args.config, *args.vs)]
    where = machine()
    found = bench(configs, args.steps)
    print(f"{where['devices']} x {where['device']}, jax {where['jax']}; median of {args.steps} steps, configs in turn")
    rows = [_row(one, found[0]) for one in found]
    table = Table(box=None, pad_edge=False)
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in shown:
        table.add_column(name, justify="left" if name == "config" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    Console().print(table)
    if args.json:
        content = {"machine": where, "steps": args.steps, "configs": [one._asdict() for one in found]}
        Path(args.json).write_text(json.dumps(content, indent=2) + "\n")
    return 0


def _row(one, first) -> dict[str, str]:
    return {
        "config": one.name,
        "ms/step": f"{1e3 * one.median:,.1f}",
        "fastest": f"{1e3 * one.fastest:,.1f}",
        "tokens/s": f"{one.tokens_per_second:,.0f}",
        "TFLOP/s": f"{one.flops_per_second / 1e12:,.3f}",
        "MFU": "" if one.mfu is None else f"{one.mfu:.1%}",
        "memory": "" if one.peak_bytes is None else f"{one.peak_bytes / 2**30:.2f} GiB",
        "time": f"{one.median / first.median:.3f} x",
    }
