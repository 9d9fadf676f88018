"""The `ncp-jax report` subcommand: a page with the curves, codebooks, routes and speed of one or several runs."""

import argparse

EXAMPLE = """examples:
  ncp-jax report runs/ncp_nano
  ncp-jax report runs/ncp_nano runs/olmo3_nano --out compared"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `report`."""
    parser = subparsers.add_parser(
        "report", help="plot runs into one HTML page", description=__doc__, epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories; several are overlaid")
    parser.add_argument("--out", metavar="DIR", help="where to write (default: RUN/report, or ./report for several)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report and print where it is. Raises ReportError if there is nothing to show."""
    from ncp_jax.report.build import report  # loads matplotlib and jinja2, which the other subcommands do without

    print(report(args.runs, args.out))
    return 0
