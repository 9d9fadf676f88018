"""`ncp-jax train CONFIG [key=value ...]`: train, or continue; `--dry-run` shows what would be trained."""

import argparse
import json

import jax
import rich

from ncp_jax.config import ConfigError, identity, load, override, to_dict


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("train", help="train a config; the same command again continues")
    parser.add_argument("config", help="file, or name of one under configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changed fields, e.g. train.steps=100")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved run and stop")


def run(args: argparse.Namespace) -> int:
    config = override(load(args.config), args.overrides)
    if args.dry_run:
        describe(config)
        return 0
    from ncp_jax.train.loop import train

    train(config, say=lambda line: print(line, flush=True))
    return 0


def describe(config) -> None:
    """Everything that a run would be, without allocating it: config, counts, FLOPs, leaf table, sharding, mixture."""
    from ncp_jax.data.pipeline import effective_mixture
    from ncp_jax.data.store import DataError
    from ncp_jax.models.flops import parameter_groups
    from ncp_jax.optim.leaves import format_table, leaf_table
    from ncp_jax.parallel.mesh import check_batch, make_mesh
    from ncp_jax.parallel.rules import format_placements, place, unboxed
    from ncp_jax.train.families import build_task
    from ncp_jax.train.step import abstract_params

    rich.print_json(json.dumps(to_dict(config)))
    task = build_task(config.model, config.data.sequence)
    boxed, _ = abstract_params(task)
    params = unboxed(boxed)
    print(f"\nidentity {identity(config)}, {config.total_steps:,} steps of {config.tokens_per_step:,} tokens")
    print(f"parameters {sum(leaf.size for leaf in jax.tree.leaves(params)):,}")
    for group, count in parameter_groups(config.model).items():
        print(f"  {group:<28} {count:>16,}")
    print(f"training FLOPs per token {task.flops_per_token:.4e} ({task.flops_convention})\n")
    print(format_table(leaf_table(params, task.leaf_rules, config.optim)))
    mesh = make_mesh(config.mesh)
    print(f"\nmesh {dict(mesh.shape)}")
    print(format_placements(place(boxed, mesh)))
    check_batch(config.train.batch, config.train.micro_batches, mesh)
    try:
        rows = effective_mixture(
            config.data, chunk=task.chunk, global_batch=config.train.batch, steps=config.total_steps
        )
    except (DataError, ConfigError) as error:
        print(f"\ndata: {error}")
        return
    for row in rows:
        print(
            f"\ndata {row.source}: weight {row.weight:.4f}, {row.documents:,} documents, {row.tokens:,} tokens, "
            f"{row.windows:,} rows, {row.epochs:.2f} epochs"
        )
