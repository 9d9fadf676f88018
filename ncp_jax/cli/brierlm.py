"""The `ncp-jax brierlm` subcommand: score trained runs by BrierLM, with errors, on the same text and places."""

import argparse

EXAMPLE = """examples:
  ncp-jax brierlm runs/calm_nano
  ncp-jax brierlm runs/calm_nano runs/calm_baseline_nano --step all
  ncp-jax brierlm runs/calm_nano --text wikitext-test.jsonl --packing official

Runs of every family can be compared. The held-out documents of the first run are scored, or --text FILE. Figures go to
RUN/eval/, and `ncp-jax report` plots them over training FLOPs."""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `brierlm`."""
    parser = subparsers.add_parser(
        "brierlm", help="score runs by BrierLM, with errors", description=__doc__, epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directories; the others are compared with the first"
    )
    parser.add_argument("--text", metavar="FILE", help="a .txt or .jsonl file (default: the run's held-out split)")
    parser.add_argument("--text-key", default="text", help="key of the text in a .jsonl line (default: text)")
    parser.add_argument("--block", type=int, metavar="T", help="tokens per row (default: as trained)")
    parser.add_argument("--packing", choices=("official", "documents"), help="how rows are cut (default: as trained)")
    parser.add_argument(
        "--starts", choices=("tokens", "blocks"),
        help="where next-token runs are scored: every token (default without a CALM run), or the starts of its blocks",
    )  # fmt: skip
    parser.add_argument("--samples", type=int, default=8, help="draws per block of a CALM run (default: 8)")
    parser.add_argument(
        "--estimator", choices=("all", "official"), default="all",
        help="all: every pair of draws (default); official: the two draws of the released code",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, metavar="N", help="only the first N rows")
    parser.add_argument("--batch", type=int, default=4, help="rows at a time; changes no score (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--step", default="best", help="checkpoint: best (default), latest, a step, or all in turn")


def run(args: argparse.Namespace) -> int:
    """Print one report per run, then each run's difference from the first; write the figures beside the runs."""
    from pathlib import Path

    from ncp_jax.evaluate.brier import compare
    from ncp_jax.evaluate.brier_runs import ScoringOptions, file_documents, held_out_documents, score_runs
    from ncp_jax.train.loaded import load_run

    options = ScoringOptions(
        block=args.block, packing=args.packing, starts=args.starts, samples=args.samples, estimator=args.estimator,
        seed=args.seed, rows=args.rows, batch=args.batch,
    )  # fmt: skip
    texts, name = None, Path(args.text).stem if args.text else "held_out"
    for step in _steps(args):
        runs = [load_run(path, step) for path in args.runs]
        first = runs[0]
        if texts is None:
            texts = file_documents(first, [args.text], args.text_key) if args.text else held_out_documents(first)
        scores = score_runs(runs, texts, options)
        for path, loaded, found in zip(args.runs, runs, scores, strict=True):
            _report(path, loaded, found, name)
        for loaded, found in zip(runs[1:], scores[1:], strict=True):
            difference = compare(found, scores[0])
            error = "" if difference.value is None else f"{difference.value:+.4f} ± {difference.error:.4f}"
            print(f"{loaded.config.name} less {first.config.name}: {error or difference.status}\n")
    return 0


def _steps(args: argparse.Namespace) -> list:
    """The checkpoints to score, one after another."""
    from ncp_jax.checkpoint.store import CheckpointStore

    if args.step != "all":
        return [args.step]
    stored = [set(CheckpointStore(f"{path}/checkpoints").steps()) for path in args.runs]
    return sorted(set.intersection(*stored))


def _report(path: str, loaded, scores, name: str) -> None:
    from ncp_jax.evaluate.brier import summarise
    from ncp_jax.evaluate.brier_runs import result_file, training_flops
    from ncp_jax.train.rundir import write_json

    report = summarise(scores)
    print(f"{loaded.config.name}, step {loaded.step}, on {name}\n{report}\n")
    target = result_file(path, name, loaded.step)
    target.parent.mkdir(exist_ok=True)
    write_json(target, report.to_dict() | {"step": loaded.step, "training_flops": training_flops(loaded)})
