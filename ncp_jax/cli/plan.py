"""The `ncp-jax plan` subcommand: whether a config fits a TPU slice and how fast it can be, without a TPU."""

import argparse
import json
from pathlib import Path

EXAMPLE = """examples:
  ncp-jax plan configs/ncp_archpreview_9b.py --topology v5p:2x2x4 --rows-per-chip 1
  ncp-jax plan configs/ncp_190m.py --topology v5e:4x4 --mesh fsdp=8,tensor=2 --json plan.json
  ncp-jax plan configs/ncp_1b.py --topology v6e:4x4 --search

The real train step is compiled for the slice by the TPU compiler (pip install 'ncp-jax[tpu]'); no TPU and no network.
Exit status: 0 it fits, 1 it does not, 2 something to mend first."""
GB = 1e9


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `plan`."""
    parser = subparsers.add_parser(
        "plan", help="compile a config for a TPU slice that is not here", description=__doc__, epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", help="a Python file, or the name of one under configs/")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changed fields, such as train.batch=64")
    parser.add_argument("--topology", required=True, metavar="KIND:SHAPE", help="for example v5p:2x2x4 or v5e:16x16")
    parser.add_argument("--slices", type=int, default=1, help="slices of this shape; the data axis spans them")
    parser.add_argument("--mesh", metavar="AXIS=N,...", help="for example fsdp=8,tensor=2 (default: the config's)")
    parser.add_argument("--rows-per-chip", type=int, metavar="N", help="train.batch = N rows per chip, one micro-batch")
    parser.add_argument("--analytic", action="store_true", help="the estimate alone, without the compiler")
    parser.add_argument(
        "--effort", choices=["quick", "full"], default="quick",
        help="full: compile as a training run would, which takes about five times as long (default: quick)",
    )  # fmt: skip
    parser.add_argument("--search", action="store_true", help="try rows, remat and meshes; compile the best five")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns 1 if it does not fit."""
    from ncp_jax.config import load, override
    from ncp_jax.plan.chips import has_compiler, parse
    from ncp_jax.plan.report import plan_one, plan_search

    where = parse(args.topology, args.slices)
    config = _laid_out(override(load(args.config), args.overrides), where, args)
    effort = None if args.analytic or not has_compiler() else args.effort
    if effort is None and not args.analytic:
        print("the TPU compiler (libtpu) is not installed: this is the analytic estimate alone")
    found = (plan_search if args.search else plan_one)(config, where, effort)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found["fits"] else 1


def _laid_out(config, where, args: argparse.Namespace):
    """The config on the mesh that was asked for, with the rows that were."""
    import dataclasses

    from ncp_jax.config import override

    if args.mesh:
        config = override(config, [f"mesh.{pair}" for pair in args.mesh.split(",")])
    elif where.slices > 1:
        config = override(config, [f"mesh.data={where.slices}"])
    if args.rows_per_chip:
        sizes = config.mesh.shape(where.chips)
        rows = args.rows_per_chip * sizes[0] * sizes[1]
        train = dataclasses.replace(config.train, batch=rows, micro_batches=1)
        evaluation = dataclasses.replace(config.evaluation, batch=rows)
        config = dataclasses.replace(config, train=train, evaluation=evaluation)
    return config
