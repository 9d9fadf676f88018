"""The command line as users script it. A change here is a change of the interface: say so in the changelog."""

import argparse
import contextlib
import io

import pytest

from ncp_jax.cli import main as cli
from ncp_jax.cli.main import main, make_parser

SURFACE = {
    "data prepare": [
        "--eos", "--out", "--overwrite", "--split-file", "--text-key", "--tokenizer", "--train-bpe", "--val-fraction",
        "SRC",
    ],
    "data train-bpe": ["--out", "--split-file", "--text-key", "--val-fraction", "--vocab", "SRC"],
    "data inspect": ["--sample", "--verify", "DIR"],
    "train": ["--coordinator", "--dry-run", "--join", "--process", "--processes", "CONFIG", "KEY=VALUE"],
    "sample": [
        "--candidates", "--history", "--max-draws", "--method", "--min-p", "--partial", "--seed", "--step", "--stop",
        "--temperature", "--tokens", "--top-k", "--top-p", "PROMPT", "RUN",
    ],
    "convert import": ["--allow-unused-ids", "--dtype", "--ignore-field", "--tokenizer", "HF_DIR", "RUN_DIR"],
    "convert export": ["--dtype", "--format", "--step", "HF_DIR", "RUN_DIR"],
    "convert inspect": ["--ignore-field", "DIR"],
    "brierlm": [
        "--batch", "--block", "--estimator", "--packing", "--rows", "--samples", "--seed", "--starts", "--step",
        "--text", "--text-key", "RUN",
    ],
    "plan": [
        "--analytic", "--effort", "--json", "--mesh", "--rows-per-chip", "--search", "--slices", "--topology", "CONFIG",
        "KEY=VALUE",
    ],
    "bench": ["--alone", "--decode", "--json", "--steps", "--vs", "CONFIG", "KEY=VALUE"],
    "report": ["--out", "RUN"],
    "yardsticks": ["run"],
}  # fmt: skip


def surface(parser: argparse.ArgumentParser, name: str = "") -> dict[str, list[str]]:
    """Arguments of every command that has no subcommands, by the words that reach it."""
    found: dict[str, list[str]] = {}
    arguments: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                found |= surface(inner, f"{name} {word}".strip())
        elif not isinstance(action, argparse._HelpAction):
            arguments += action.option_strings or [str(action.metavar or action.dest)]
    return found or {name: sorted(arguments)}


def test_commands_and_options():
    assert surface(make_parser()) == SURFACE


@pytest.mark.parametrize("command", [[], *[name.split() for name in SURFACE]], ids=" ".join)
def test_every_command_explains_itself(command):
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    assert said.getvalue().startswith("usage: ncp-jax")


def test_an_unknown_command_exits_with_2():
    with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as ended:
        main(["tain"])
    assert ended.value.code == 2
    assert "invalid choice: 'tain'" in said.getvalue()


@pytest.mark.parametrize(
    "words",
    [["a=1", "b=2", "--dry-run"], ["a=1", "--dry-run", "b=2"], ["--dry-run", "a=1", "b=2"]],
    ids=" ".join,
)
def test_changes_and_options_mix(monkeypatch, words):
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(cli.importlib.import_module("ncp_jax.cli.train"), "run", seen.append)
    assert main(["train", "CONFIG", *words]) == 0
    assert (seen[0].config, seen[0].overrides, seen[0].dry_run) == ("CONFIG", ["a=1", "b=2"], True)


@pytest.mark.parametrize("line", ["train c a=1 --steps 3", "train c -x", "report r -x", "report r a=1 -x"])
def test_unknown_options_exit_with_2(capsys, line):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ZeroDivisionError])
def test_what_is_not_the_users_to_mend(monkeypatch, capsys, raised):
    """An interrupt is an exit status; a defect keeps its traceback."""

    def fail(args):
        raise raised

    monkeypatch.setattr(cli.importlib.import_module("ncp_jax.cli.train"), "run", fail)
    if raised is KeyboardInterrupt:
        assert main(["train", "x"]) == 130
        assert capsys.readouterr().err == "ncp-jax train: interrupted\n"
    else:
        with pytest.raises(ZeroDivisionError):
            main(["train", "x"])
