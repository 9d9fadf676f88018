"""The `ncp-jax sample` subcommand: continue a prompt with a trained run."""

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ncp_jax.generate.text import Event
    from ncp_jax.train.loaded import LoadedRun

EXAMPLE = """examples:
  ncp-jax sample runs/ncp_nano "The whale" --tokens 60
  ncp-jax sample runs/ncp_nano "The whale" --temperature 1 --top-p 0.9 --seed 7
  ncp-jax sample runs/ncp_nano "The whale" --temperature 0 --step latest
  ncp-jax sample runs/calm_nano "The whale was there" --temperature 0.5 --candidates 64
  ncp-jax sample runs/calm_nano "The whale was there" --temperature 0.7 --method exact --partial condition

A CALM run draws chunks of tokens and has no probabilities: its temperature is had by comparing draws, so it is 1/n for
--method vote and any number in (0, 1] for --method exact. What that took is told on stderr."""

TOKENS = ("top_k", "top_p", "min_p")  # of models with token probabilities
CHUNKS = ("method", "candidates", "max_draws", "partial")  # of CALM


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `sample`. An option of some families has no default here: giving it to another is an error."""
    parser = subparsers.add_parser(
        "sample", help="continue a prompt with a trained run", description=__doc__, epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", help="run directory, for example runs/ncp_nano")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument("--tokens", type=int, default=100, help="new tokens, at most (default: 100)")
    parser.add_argument(
        "--temperature", type=float, help="default: 0.8, where 0 is greedy; CALM: 0.5, its authors' advice"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the fewest tokens with probability P together")
    parser.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest one")
    parser.add_argument(
        "--method", choices=("vote", "exact"),
        help="CALM: choose among candidates by what they share (vote, default; temperatures 1, 1/2, 1/3, ..), or draw "
        "until draws agree (exact; any temperature up to 1)",
    )  # fmt: skip
    parser.add_argument("--candidates", type=int, metavar="N", help="CALM: chunks drawn for a vote (default: 200)")
    parser.add_argument(
        "--max-draws", type=int, metavar="N", help="CALM: draws per chunk before exact gives way to a vote (10000)"
    )
    parser.add_argument(
        "--partial", choices=("trim", "condition", "pad"),
        help="CALM, a prompt of no whole number of chunks: leave out its first few tokens (trim, default), draw the "
        "chunk that it begins until it begins so (condition), or fill up with pads (pad, the official code)",
    )  # fmt: skip
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument(
        "--history", choices=("encoder", "predicted"),
        help="what NCP's concept module reads of the new text: its encoder states, as the released runtime does "
        "(default), or its own predictions, as the report says",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument(
        "--step", default="best", help="checkpoint: best (default; the newest where none is marked), latest, or a step"
    )


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation as it is drawn."""
    from ncp_jax.config import ConfigError
    from ncp_jax.train.loaded import load_run

    loaded = load_run(args.run, args.step)
    kind = loaded.config.model.kind
    if kind == "calm_autoencoder":
        raise ConfigError(
            f"{args.run} is an autoencoder: it turns chunks into latents and back, and draws none; sample from a "
            "language model that was trained on it (model.kind 'calm')"
        )
    if not args.prompt:
        raise ConfigError("the prompt is empty; give at least one character to continue")
    return _chunks(args, loaded) if kind == "calm" else _tokens(args, loaded)


def _tokens(args: argparse.Namespace, loaded: "LoadedRun") -> int:
    """A model with token probabilities."""
    from ncp_jax.config import ConfigError
    from ncp_jax.generate.engine import Engine
    from ncp_jax.generate.sampling import Sampling
    from ncp_jax.train.families import build_model

    if loaded.task.forward is None:
        raise ConfigError(f"{args.run} holds a '{loaded.task.name}', which gives no token logits to sample from")
    kind = loaded.config.model.kind
    _refuse(args, CHUNKS, kind, "it draws token by token; use --temperature, --top-k, --top-p or --min-p")
    if kind != "ncp":
        _refuse(args, ("history",), kind, "only NCP has a concept module; leave it out")
    how = Sampling(0.8 if args.temperature is None else args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    how.check()
    engine = Engine(
        build_model(loaded.config.model), loaded.params, capacity=_capacity(args, loaded), tokenizer=loaded.tokenizer,
        history=args.history or "encoder",
    )  # fmt: skip
    _print(args.prompt, engine.stream([args.prompt], max_new=args.tokens, how=how, stop=args.stop))
    return 0


def _chunks(args: argparse.Namespace, loaded: "LoadedRun") -> int:
    """A CALM language model."""
    from ncp_jax.generate.calm import DEFAULT, CalmEngine
    from ncp_jax.generate.temperature import Tempering
    from ncp_jax.train.families import build_model

    _refuse(args, TOKENS, "calm", "it draws whole chunks and has no token probabilities; use --temperature or --method")
    _refuse(args, ("history",), "calm", "only NCP has a concept module; leave it out")
    given = {name: getattr(args, name) for name in ("method", "candidates", "max_draws")}
    how = Tempering(
        DEFAULT.temperature if args.temperature is None else args.temperature,
        **{"method": DEFAULT.method} | {name: value for name, value in given.items() if value is not None},
    )
    engine = CalmEngine(
        build_model(loaded.config.model), loaded.params, loaded.frozen, capacity=_capacity(args, loaded),
        tokenizer=loaded.tokenizer, partial=args.partial or "trim",
    )  # fmt: skip
    events = engine.stream([args.prompt], max_new=args.tokens, how=how, seed=args.seed, stop=args.stop)
    _print(args.prompt, events)
    work, rest = engine.work, len(loaded.tokenizer.encode(args.prompt)) % loaded.config.model.chunk
    if rest and engine.partial == "trim":
        print(f"tokens left out at the prompt's start: {rest} (--partial trim)", file=sys.stderr)
    print(
        f"{work.draws / work.chunks:.1f} draws per chunk of {loaded.config.model.chunk} tokens, "
        f"{work.exact / work.chunks:.0%} of {work.chunks} chunks exactly at temperature {how.temperature:g}",
        file=sys.stderr,
    )
    return 0


def _capacity(args: argparse.Namespace, loaded: "LoadedRun") -> int:
    return len(loaded.tokenizer.encode(args.prompt)) + max(args.tokens, 0)


def _refuse(args: argparse.Namespace, names: tuple[str, ...], kind: str, instead: str) -> None:
    """Raise ConfigError if an option was given that means nothing for a family."""
    from ncp_jax.config import ConfigError

    for name in names:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does not apply to a '{kind}' model: {instead}")


def _print(prompt: str, events: "Iterator[Event]") -> None:
    print(prompt, end="", flush=True)
    for event in events:
        print(event.text, end="", flush=True)
    print()
