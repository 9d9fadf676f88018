"""The `ncp-jax bench` subcommand: median time of a step or a decoded token, MFU and memory, configs side by side."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

EXAMPLE = """examples:
  ncp-jax bench configs/ncp_nano.py
  ncp-jax bench configs/ncp_nano.py --vs configs/olmo3_nano.py --steps 30
  ncp-jax bench configs/ncp_190m.py train.batch=8 data.sequence=1024 --json bench.json
  ncp-jax bench configs/ncp_nano.py --decode 64 train.batch=4

Random tokens, random weights (a frozen autoencoder's too); KEY=VALUE pairs change every config that is named."""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `bench`."""
    parser = subparsers.add_parser(
        "bench", help="time training steps, or decoding", description=__doc__, epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", help="a Python file, or the name of one under configs/")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changed fields, such as train.batch=8")
    parser.add_argument("--vs", action="append", default=[], metavar="CONFIG", help="measure this one too; repeatable")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each (default: 20)")
    parser.add_argument(
        "--decode", type=int, metavar="N", help="time N generated tokens a row instead, after prompts that fill the row"
    )
    parser.add_argument(
        "--alone", action="store_true",
        help="one config after the other, for a quiet machine: less memory, and figures as soon as they are known; "
        "memory is then the most so far",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; -: print them, a line per config")


def run(args: argparse.Namespace) -> int:
    """Print the table, or JSON lines."""
    from ncp_jax.config import ConfigError, load, override
    from ncp_jax.evaluate.speed import bench_decoding
    from ncp_jax.train.bench import bench, machine

    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps}: at least one")
    configs = [override(load(name), args.overrides) for name in (args.config, *args.vs)]
    where, lines = machine(), args.json == "-"
    say = partial(print, file=sys.stderr if lines else sys.stdout, flush=True)
    found: list = []
    figures: list[dict] = []
    for group in [[config] for config in configs] if args.alone else [configs]:
        timed: list = bench_decoding(group, args.decode, say) if args.decode else bench(group, args.steps, say)
        found += timed
        for config, one in zip(group, timed, strict=True):
            figures.append(_settings(args, config) | one._asdict())
            if lines:
                print(json.dumps({"machine": where} | figures[-1]), flush=True)
    if lines:
        return 0
    times = f"{args.decode} tokens of each row" if args.decode else f"{args.steps} steps"
    turns = "one config after the other" if args.alone else "configs in turn"
    print(f"{where['devices']} x {where['device']}, jax {where['jax']}; median of {times}, {turns}")
    _table([_decoded(one, found[0]) if args.decode else _row(one, found[0]) for one in found])
    if args.json:
        Path(args.json).write_text(
            json.dumps({"machine": where, "steps": args.steps, "configs": figures}, indent=2) + "\n"
        )
    return 0


def _settings(args: argparse.Namespace, config) -> dict:
    """What of a config the figures depend on."""
    return {
        "what": "decode" if args.decode else "train", "batch": config.train.batch, "sequence": config.data.sequence,
        "optimizer": config.optim.optimizer,
    }  # fmt: skip


def _table(rows: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    shown = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in shown:
        table.add_column(name, justify="left" if name == "config" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    Console().print(table)


def _decoded(one, first) -> dict[str, str]:
    return {
        "config": one.name,
        "ms/token": f"{1e3 * one.median:,.2f}",
        "fastest": f"{1e3 * one.fastest:,.2f}",
        "tokens/s": f"{one.tokens_per_second:,.0f}",
        "first token": f"{1e3 * one.first_token_seconds:,.1f} ms",
        "memory": _memory(one),
        "time": f"{one.median / first.median:.3f} x",
    }


def _row(one, first) -> dict[str, str]:
    return {
        "config": one.name,
        "ms/step": f"{1e3 * one.median:,.1f}",
        "fastest": f"{1e3 * one.fastest:,.1f}",
        "tokens/s": f"{one.tokens_per_second:,.0f}",
        "TFLOP/s": f"{one.flops_per_second / 1e12:,.3f}",
        "MFU": "" if one.mfu is None else f"{one.mfu:.1%}",
        "memory": _memory(one),
        "time": f"{one.median / first.median:.3f} x",
    }


def _memory(one) -> str:
    return "" if one.peak_bytes is None else f"{one.peak_bytes / 2**30:.2f} GiB"
