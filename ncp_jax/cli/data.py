"""The `ncp-jax data` subcommand: prepare a corpus, train a tokenizer, look at what was prepared."""

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ncp_jax.data import prepare as corpus
from ncp_jax.data import tokenizer as tokenizers
from ncp_jax.data.documents import find_sources
from ncp_jax.data.store import DataError, Manifest, TokenStore
from ncp_jax.data.tokenizer import Tokenizer

EXAMPLE = """examples:
  ncp-jax data prepare corpus.jsonl --out data/corpus --train-bpe 4096
  ncp-jax data prepare books/ code.jsonl.zst --out data/mix --tokenizer tokenizer.json --val-fraction 0.01
  ncp-jax data inspect data/corpus --sample 2"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `data` and its actions."""
    parser = subparsers.add_parser(
        "data", help="prepare and inspect token stores", description=__doc__, epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_prepare(
        actions.add_parser("prepare", help="documents -> token stores DIR/train, DIR/val and DIR/tokenizer.json")
    )
    _add_train_bpe(actions.add_parser("train-bpe", help="training documents -> tokenizer.json"))
    _add_inspect(actions.add_parser("inspect", help="counts, tokenizer and samples of a prepared corpus"))


def run(args: argparse.Namespace) -> int:
    """Carry out the chosen action and return the exit status. Raises DataError for bad input."""
    return {"prepare": _prepare, "train-bpe": _train_bpe, "inspect": _inspect}[args.action](args)


def _add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources", nargs="+", metavar="SRC", help=".txt, .jsonl, .jsonl.gz, .jsonl.zst, or a directory of them"
    )
    parser.add_argument("--text-key", default="text", help="key of the text in a JSON line (default: text)")
    split = parser.add_mutually_exclusive_group()
    split.add_argument(
        "--val-fraction",
        type=float,
        default=0.1,
        help="share of the documents held out, by hash of the text (default: 0.1)",
    )
    split.add_argument("--split-file", metavar="JSON", help='held-out documents: {"held_out": [{"sha1": ...}, ...]}')


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="directory or URL (gs://...) to create")
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", metavar="JSON", help="a Hugging Face tokenizer.json")
    tokenizer.add_argument(
        "--train-bpe", type=int, metavar="VOCAB", help="train a byte-level BPE on the training documents"
    )
    parser.add_argument(
        "--eos", metavar="TOKEN", help="name of the tokenizer's end-of-text token, where it is not a usual one"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that was made from something else")


def _add_train_bpe(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser)
    parser.add_argument("--out", required=True, metavar="JSON", help="the tokenizer.json to write")
    parser.add_argument("--vocab", required=True, type=int, help="ids, the special token included")


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", metavar="DIR", help="a prepared corpus")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="N", help="show the beginning of N documents per split"
    )
    parser.add_argument("--verify", action="store_true", help="read everything and compare checksums")


def _prepare(args: argparse.Namespace) -> int:
    options = corpus.Options(
        out=args.out, tokenizer=args.tokenizer, train_bpe=args.train_bpe, eos=args.eos, val_fraction=args.val_fraction,
        split_file=args.split_file, text_key=args.text_key, overwrite=args.overwrite,
    )  # fmt: skip
    began = time.monotonic()
    with _bars(args.sources) as progress:
        made = corpus.prepare(args.sources, options, progress)
    if made.reused:
        print(f"{made.out} is already prepared from these sources; nothing to do")
        return 0
    for split, manifest in made.manifests.items():
        print(_summary(split, manifest))
    tokens = sum(manifest.tokens for manifest in made.manifests.values())
    seconds = time.monotonic() - began
    vocab = made.manifests["train"].vocab
    print(f"{made.out}: {tokens:,} tokens, vocabulary {vocab:,}, {seconds:.1f} s")
    if args.train_bpe and vocab < args.train_bpe:
        print(f"the training text gave only {vocab:,} of {args.train_bpe:,} ids; set model.vocab to {vocab}")
    return 0


def _train_bpe(args: argparse.Namespace) -> int:
    split = corpus.Split(args.val_fraction, args.split_file)
    with _bars(args.sources) as progress:
        tokenizer = corpus.train_tokenizer(args.sources, args.vocab, split, args.text_key, progress)
    tokenizers.save(tokenizer, args.out)
    print(f"{args.out}: {tokenizer.size:,} ids, sha256 {tokenizer.hash[:12]}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    root = args.corpus.rstrip("/")
    stores = {split: TokenStore.open(f"{root}/{split}") for split in corpus.SPLITS}
    tokenizer = Tokenizer.load(f"{root}/tokenizer.json", eos=_eos_name(root))
    for split, store in stores.items():
        if args.verify:
            store.verify()
        print(_summary(split, store.manifest))
        for number in range(min(args.sample, store.manifest.documents)):
            start, stop = store.offsets[number : number + 2].tolist()
            print(f"  [{number}] {tokenizer.decode(store.read(start, min(stop, start + 64)))!r}")
    manifest = stores["train"].manifest
    if tokenizer.hash != manifest.tokenizer:
        raise DataError(f"{root}/tokenizer.json is not the tokenizer that {root}/train was made with; prepare it again")
    print(
        f"tokenizer {tokenizer.hash[:12]}: {tokenizer.size:,} ids, end of text {tokenizer.eos_name} = {tokenizer.eos}"
    )
    print(f"ids stored as {manifest.dtype}; checksums {'match' if args.verify else 'not compared (--verify)'}")
    for name, source in manifest.sources.items():
        print(f"source {name}: {source['bytes']:,} bytes, sha256 {source['sha256'][:12]}")
    return 0


def _eos_name(root: str) -> str | None:
    return corpus.receipt_of(root)["tokenizer"].get("eos")


def _summary(split: str, manifest: Manifest) -> str:
    per_token = manifest.text_bytes / max(manifest.tokens, 1)
    skipped = f", {manifest.skipped_empty:,} empty documents skipped" if manifest.skipped_empty else ""
    return (
        f"{split:>5}: {manifest.documents:,} documents, {manifest.tokens:,} tokens, {manifest.text_bytes:,} bytes "
        f"({per_token:.2f} per token){skipped}"
    )


@contextlib.contextmanager
def _bars(sources: list[str]) -> Iterator[corpus.Progress]:
    """One bar per pass over the sources, on stderr, in bytes of the files as they lie on disk."""
    total = sum(Path(file).stat().st_size for file in find_sources(sources).values())
    columns = (TextColumn("{task.description:>9}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def progress(what: str, size: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.advance(tasks[what], size)

        yield progress
