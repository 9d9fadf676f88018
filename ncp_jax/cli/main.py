"""`ncp-jax`: one command, one thin file per subcommand."""

import argparse
import importlib
import sys

from ncp_jax.config import ConfigError

# name -> one-line help. Each lives in ncp_jax/cli/NAME.py as add_parser(subparsers) and run(args).
SUBCOMMANDS = ("data", "train", "sample", "report", "yardsticks")

# What a user can mend: one line on stderr, exit status 2, no traceback.
USER_ERRORS: tuple[type[Exception], ...] = (ConfigError,)


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="ncp-jax", description="Train latent-space language models: prepare data, train, look, sample."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in SUBCOMMANDS:
        importlib.import_module(f"ncp_jax.cli.{name}").add_parser(subparsers)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    args = make_parser().parse_args(arguments)
    try:
        return importlib.import_module(f"ncp_jax.cli.{args.command}").run(args) or 0
    except _user_errors() as error:
        print(f"ncp-jax {args.command}: {error}", file=sys.stderr)
        return 2


def _user_errors() -> tuple[type[Exception], ...]:
    from ncp_jax.checkpoint.leaves import CheckpointError
    from ncp_jax.data.store import DataError
    from ncp_jax.optim.leaves import LeafError
    from ncp_jax.train.loop import BadStep

    return (*USER_ERRORS, CheckpointError, DataError, LeafError, BadStep)


if __name__ == "__main__":
    sys.exit(main())
