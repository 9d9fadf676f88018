"""The `ncp-jax convert` subcommand: published checkpoints in and out of run directories."""

import argparse

EXAMPLE = """examples:
  ncp-jax convert inspect NCP-ArchPreview
  ncp-jax convert import NCP-ArchPreview runs/ncp_archpreview
  ncp-jax convert export runs/ncp_9b NCP-ours
  ncp-jax convert export runs/olmo3_7b OLMo-ours --dtype float32
  ncp-jax convert import CALM-M runs/calm_m
  ncp-jax convert export runs/calm_m autoencoder --format calm_autoencoder

formats (each family's first is its default):
  ncp_olmo3         NCP-ArchPreview as released
  native            the same model as its training code saves it
  olmo3             OLMo-3, for transformers
  calm              a CALM language model with its autoencoder, as released
  calm_autoencoder  an autoencoder of chunks, also that of a CALM run: what the official code wants as ae_path
  llama             CALM's autoregressive baseline, for transformers

Tensors are read from safetensors files, or from pytorch_model.bin without torch and without running its pickle."""
FORMATS = ("ncp_olmo3", "native", "olmo3", "calm_autoencoder", "calm", "llama")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `convert`."""
    parser = subparsers.add_parser(
        "convert", help="read and write published checkpoints", description=__doc__, epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_import(actions)
    _add_export(actions)
    inspect = actions.add_parser("inspect", help="check a published checkpoint, or show what a run can export")
    inspect.add_argument("folder", metavar="DIR", help="a published checkpoint or a run directory")
    _add_ignore(inspect)


def run(args: argparse.Namespace) -> int:
    """Convert, then say what was done."""
    return {"import": _import, "export": _export, "inspect": _inspect}[args.action](args)


def _add_import(actions: argparse._SubParsersAction) -> None:
    parser = actions.add_parser("import", help="make a run directory from a published checkpoint")
    parser.add_argument("folder", metavar="HF_DIR", help="folder with config.json, tensor files, tokenizer.json")
    parser.add_argument("run", metavar="RUN_DIR", help="new run directory")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the stored parameters (default: float32)",
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer.json, where HF_DIR has none; none: weights alone"
    )
    parser.add_argument(
        "--allow-unused-ids", action="store_true", help="accept a vocabulary padded beyond the tokenizer's ids"
    )
    _add_ignore(parser)


def _add_export(actions: argparse._SubParsersAction) -> None:
    parser = actions.add_parser("export", help="write a run's parameters as a published checkpoint")
    parser.add_argument("run", metavar="RUN_DIR", help="run directory, for example runs/ncp_nano")
    parser.add_argument("folder", metavar="HF_DIR", help="new folder")
    parser.add_argument("--format", choices=FORMATS, help="default: the released one of the model's family")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the tensors (default: bfloat16)"
    )
    parser.add_argument(
        "--step", default="best", help="checkpoint: best (default; the newest where none is marked), latest, or a step"
    )


def _add_ignore(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ignore-field", action="append", default=[], metavar="NAME", help="an unknown config.json field to pass over"
    )


def _import(args: argparse.Namespace) -> int:
    from ncp_jax.convert.runs import Import, import_run

    how = Import(args.dtype, args.tokenizer, tuple(args.ignore_field), args.allow_unused_ids)
    done = import_run(args.folder, args.run, how)
    print(f"{done.format}: {done.tensors} tensors, {done.parameters:,} parameters -> {args.run} (step 0, {args.dtype})")
    return 0


def _export(args: argparse.Namespace) -> int:
    from ncp_jax.convert.runs import export_run

    done = export_run(args.run, args.folder, args.format, args.dtype, args.step)
    print(f"{done.tensors} tensors, {done.parameters:,} parameters -> {args.folder} ({args.dtype})")
    if done.rounded:
        print(f"{len(done.rounded)} tensors were rounded to {args.dtype}; --dtype float32 keeps every bit")
    for setting in done.left_out:
        print(f"not written, the format has no field for it (ours -> what readers assume): {setting}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from ncp_jax.convert.runs import describe

    print("\n".join(describe(args.folder, args.ignore_field)))
    return 0
