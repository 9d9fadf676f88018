"""The `ncp-jax sample` subcommand: continue a prompt with a trained run."""

import argparse

EXAMPLE = """examples:
  ncp-jax sample runs/ncp_nano "The whale" --tokens 60
  ncp-jax sample runs/ncp_nano "The whale" --temperature 1 --top-p 0.9 --seed 7
  ncp-jax sample runs/ncp_nano "The whale" --temperature 0 --step latest"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `sample`."""
    parser = subparsers.add_parser(
        "sample", help="continue a prompt with a trained run", description=__doc__, epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", help="run directory, for example runs/ncp_nano")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument("--tokens", type=int, default=100, help="new tokens, at most (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the fewest tokens with probability P together")
    parser.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest one")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument(
        "--history", choices=("encoder", "predicted"), default="encoder",
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
    from ncp_jax.generate.engine import Engine
    from ncp_jax.generate.sampling import Sampling
    from ncp_jax.train.families import build_model
    from ncp_jax.train.loaded import load_run

    how = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.seed)
    how.check()
    loaded = load_run(args.run, args.step)
    if loaded.task.forward is None:
        raise ConfigError(f"{args.run} holds a '{loaded.task.name}', which gives no token logits to sample from")
    if not args.prompt:
        raise ConfigError("the prompt is empty; give at least one character to continue")
    capacity = len(loaded.tokenizer.encode(args.prompt)) + max(args.tokens, 0)
    engine = Engine(
        build_model(loaded.config.model), loaded.params, capacity=capacity, tokenizer=loaded.tokenizer,
        history=args.history,
    )  # fmt: skip
    events = engine.stream([args.prompt], max_new=args.tokens, how=how, stop=args.stop)
    print(args.prompt, end="", flush=True)
    for event in events:
        print(event.text, end="", flush=True)
    print()
    return 0
