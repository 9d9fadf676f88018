"""`ncp-jax`: one command, one thin file per subcommand.

Exit status: 0 done, or stopped in order by SIGTERM or SIGINT; 1 training failed (a bad step, a disk that refused, a
process of another host that is gone);
2 something to mend before it can run; 130 interrupted twice.
"""

import argparse
import importlib
import os
import sys
import traceback

# Each lives in ncp_jax/cli/NAME.py as add_parser(subparsers) and run(args).
SUBCOMMANDS = ("data", "train", "sample", "brierlm", "plan", "bench", "report", "yardsticks", "convert")


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
    """Run a subcommand; returns the exit status. What a user can mend is one message on stderr, no traceback."""
    args = _parsed(make_parser(), arguments)
    try:
        return importlib.import_module(f"ncp_jax.cli.{args.command}").run(args) or 0
    except KeyboardInterrupt:
        print(f"ncp-jax {args.command}: interrupted", file=sys.stderr)
        return _ended(130)
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        status = _status(error)
        if status is None:
            _ended(1, error)
            raise
        print(f"ncp-jax {args.command}: {error}", file=sys.stderr)
        return _ended(status)


def _parsed(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Arguments, KEY=VALUE pairs after an option included, which argparse leaves over."""
    args, rest = parser.parse_known_args(arguments)
    pairs = [word for word in rest if not word.startswith("-")]
    if pairs and pairs == rest and hasattr(args, "overrides"):
        args.overrides += pairs
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _ended(status: int, unexpected: Exception | None = None) -> int:
    """The exit status of a failure; one of several processes ends with it at once, instead of waiting for the rest."""
    from ncp_jax.parallel.processes import joined
    from ncp_jax.parallel.watch import end_process

    if joined():
        if unexpected is not None:
            traceback.print_exception(unexpected)
        end_process(status)
    return status


def _status(error: Exception) -> int | None:
    """Exit status for an error that explains itself; None for one that is a defect of this program."""
    from ncp_jax.checkpoint.store import CheckpointError, CheckpointSaveError
    from ncp_jax.config import ConfigError
    from ncp_jax.data.store import DataError
    from ncp_jax.ops.scoring import ScoreError
    from ncp_jax.optim.leaves import LeafError
    from ncp_jax.parallel.processes import ProcessError
    from ncp_jax.train.loop import BadStep

    if isinstance(error, (BadStep, CheckpointSaveError, ProcessError)):
        return 1
    return 2 if isinstance(error, (ConfigError, CheckpointError, DataError, LeafError, ScoreError)) else None


if __name__ == "__main__":
    sys.exit(main())
