"""`ncp-jax sample RUN "prompt"`: continue a prompt with a trained run."""

import argparse


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("sample", help="continue a prompt with a trained run")
    parser.add_argument("run", help="run directory")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=100, help="new tokens (default 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    parser.add_argument("--top-k", type=int, default=None, help="keep the k likeliest tokens")
    parser.add_argument("--top-p", type=float, default=None, help="keep the smallest set with this probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", default="best", help="best (default), latest, or a step")


def run(args: argparse.Namespace) -> int:
    from ncp_jax.generate.sample import Sampling, load_run, sample

    loaded = load_run(args.run, args.step)
    how = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    print(args.prompt, end="", flush=True)
    for piece in sample(loaded, args.prompt, args.tokens, how):
        print(piece, end="", flush=True)
    print()
    return 0
