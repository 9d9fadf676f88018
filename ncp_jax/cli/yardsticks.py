"""`ncp-jax yardsticks RUN`: the run's held-out bits per byte beside models that need no training."""

import argparse
import itertools
from pathlib import Path


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("yardsticks", help="held-out bits per byte beside a byte 5-gram and xz")
    parser.add_argument("run", help="run directory; its first data source is the text that is measured")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ncp_jax.config import ConfigError
    from ncp_jax.data.store import TokenStore
    from ncp_jax.data.tokenizer import Tokenizer
    from ncp_jax.evaluate.yardsticks import yardsticks
    from ncp_jax.train.rundir import read_json, write_json

    path = Path(args.run)
    config, summary = read_json(path / "config.json"), read_json(path / "summary.json")
    if config is None or summary is None:
        raise ConfigError(f"{path} is not a finished run (no config.json or summary.json); train it to its end first")
    if "best_bits_per_byte" not in summary:
        raise ConfigError(
            f"{path} holds a '{summary['task']}', which has no bits per byte; compare it by 'ncp-jax brierlm'"
        )
    source, split = config["config"]["data"]["mixture"][0], config["config"]["evaluation"]["split"]
    found = read_json(path / "yardsticks.json")
    if found is None:
        tokenizer = Tokenizer.load(f"{source['path']}/tokenizer.json")
        texts = [_texts(TokenStore.open(f"{source['path']}/{name}"), tokenizer) for name in (source["split"], split)]
        found = yardsticks(*texts)
        write_json(path / "yardsticks.json", found)
    table = Table(title=f"held-out bits per byte, {source['path']}/{split} (lower is better)")
    table.add_column("model")
    table.add_column("bits per byte", justify="right")
    ours = f"{summary['name']}, step {summary['best_step']} (best of {summary['step']})"
    for name, value in sorted([(ours, summary["best_bits_per_byte"]), *found.items()], key=lambda row: row[1]):
        table.add_row(name, f"{value:.3f}", style="bold" if name == ours else None)
    Console().print(table)
    return 0


def _texts(store, tokenizer) -> list[str]:
    """The documents of a store. Byte-level tokenizers give the text back exactly."""
    ids, bounds = store.read(0, store.manifest.tokens), store.offsets
    return [tokenizer.decode(ids[a : b - 1]) for a, b in itertools.pairwise(bounds)]  # without end-of-text
