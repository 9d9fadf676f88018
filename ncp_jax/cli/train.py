"""The `ncp-jax train` subcommand: train a config, or continue it; `--dry-run` shows what would be trained."""

import argparse
import json

EXAMPLE = """examples:
  ncp-jax train configs/ncp_nano.py
  ncp-jax train configs/ncp_nano.py train.steps=900 workdir=runs/longer
  ncp-jax train configs/ncp_nano.py --dry-run
  ncp-jax train configs/ncp_1b.py --coordinator 10.0.0.1:8476 --processes 4 --process 2    (one on each host, from 0)

The same command again continues from the newest checkpoint. SIGTERM or Ctrl-C saves one and stops."""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `train`."""
    parser = subparsers.add_parser(
        "train", help="train a config; the same command again continues", description=__doc__, epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("config", metavar="CONFIG", help="a Python file, or the name of one under configs/")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changed fields, such as train.steps=100")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved run, and stop")
    hosts = parser.add_argument_group("several hosts, one process on each")
    hosts.add_argument("--join", action="store_true", help="the platform names the others (TPU VM, GKE, Slurm)")
    hosts.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens; or JAX_COORDINATOR_ADDRESS")
    hosts.add_argument("--processes", type=int, metavar="N", help="how many there are; or JAX_NUM_PROCESSES")
    hosts.add_argument("--process", type=int, metavar="I", help="which this is, from 0; or JAX_PROCESS_ID")


def run(args: argparse.Namespace) -> int:
    """Train, or describe. Raises what `train.loop.train` raises."""
    from ncp_jax.config import load, override
    from ncp_jax.train.throughput import duration

    config = override(load(args.config), args.overrides)
    if args.dry_run:
        describe(config)
        return 0
    from ncp_jax.parallel.processes import asked_to_join, join

    given = (args.coordinator, args.processes, args.process)
    if args.join or asked_to_join() or given != (None, None, None):
        join(config.processes, *given)
    import jax

    from ncp_jax.train.loop import train

    summary = train(config, say=lambda line: print(line, flush=True))
    if summary["finished"] and jax.process_index() == 0:
        unit, best = summary["criterion"].replace("bits_per_byte", "bits/byte"), summary[f"best_{summary['criterion']}"]
        found = f", best {best:.4f} {unit} at step {summary['best_step']}" if best is not None else ""
        print(f"{summary['step']:,} steps in {duration(summary['seconds'])}{found}")
        print(f'look: ncp-jax report {config.directory}    try: ncp-jax sample {config.directory} "PROMPT"')
    return 0


def describe(config) -> None:
    """Everything that a run would be, without allocating it: config, counts, FLOPs, leaf table, sharding, mixture."""
    import jax
    import rich

    from ncp_jax.config import ConfigError, identity, to_dict
    from ncp_jax.data.pipeline import effective_mixture
    from ncp_jax.data.store import DataError
    from ncp_jax.optim.leaves import format_table, leaf_table
    from ncp_jax.optim.schedules import plan
    from ncp_jax.parallel.mesh import check_rows, check_sequence, make_mesh
    from ncp_jax.parallel.rules import format_placements, place, unboxed
    from ncp_jax.train.families import build_task
    from ncp_jax.train.step import abstract_params

    task, mesh, total = build_task(config.model, config.data.sequence), make_mesh(config.mesh), config.total_steps
    check_rows(config.train.batch, mesh, micro_batches=config.train.micro_batches)
    check_sequence(config.data.sequence, task.chunk, mesh)
    schedule = plan(config.optim.schedule, total, config.tokens_per_step)
    boxed, boxed_frozen = abstract_params(task)
    params = unboxed(boxed)

    rich.print_json(json.dumps(to_dict(config)))
    print(f"\nidentity {identity(config)}, {total:,} steps of {config.tokens_per_step:,} tokens in {config.directory}")
    for note in schedule.notes:
        print(note)
    print(f"parameters {sum(leaf.size for leaf in jax.tree.leaves(params)):,}")
    groups = task.parameters
    for group, count in groups.items():
        print(f"  {group:<28} {count:>16,}")
    if "codebooks" in groups:
        print(f"VQ interface (prediction heads and codebooks) {groups['prediction_heads'] + groups['codebooks']:,}")
    if boxed_frozen is not None:
        print(f"frozen parameters {sum(leaf.size for leaf in jax.tree.leaves(unboxed(boxed_frozen))):,}")
    print(f"training FLOPs per token {task.flops_per_token:.4e}: {task.flops_convention}\n")
    print(format_table(leaf_table(params, task.leaf_rules, config.optim)))
    print(f"\nmesh {config.mesh.describe()} on {mesh.size} devices: {dict(mesh.shape)}")
    print(format_placements(place(boxed, mesh)))
    try:
        rows = effective_mixture(
            config.data, chunk=task.chunk, global_batch=config.train.batch, steps=total, ends=task.reads_ends
        )
    except (DataError, ConfigError) as error:  # a run may be looked at before its data is there
        print(f"\ndata: {error}")
        return
    for row in rows:
        print(
            f"\ndata {row.source}: weight {row.weight:.4f}, {row.documents:,} documents, {row.tokens:,} tokens, "
            f"{row.windows:,} rows, {row.epochs:.2f} epochs"
        )
