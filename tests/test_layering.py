"""Layers: a file imports from lower layers, or from its own package, and from nothing else of this project."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "ncp_jax"
LAYERS = [
    {"config", "tree", "__init__"},
    {"ops"},
    {"nn"},
    {"models", "parallel", "optim", "data", "checkpoint"},
    {"train", "generate", "adapt"},
    {"evaluate", "diagnostics", "ladder", "report", "convert", "plan"},
    {"cli"},
]
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
FILES = sorted(ROOT.rglob("*.py"))


def package_of(file: Path) -> str:
    """`train` for train/loop.py, `config` for config.py."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, package) of every import of this project, wherever it stands in the file."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""] if node.module != "ncp_jax" else [f"ncp_jax.{a.name}" for a in node.names]
        else:
            names = ["ncp_jax.RELATIVE"] if isinstance(node, ast.ImportFrom) else []
        found += [(node.lineno, name.split(".")[1]) for name in names if name.startswith("ncp_jax.")]
    return found


def violations(package: str, source: str) -> list[str]:
    """One sentence per import that the layers forbid."""
    lines = []
    for line, other in imported(ast.parse(source)):
        if other == package:
            continue
        if other not in LAYER:
            lines.append(f"line {line} imports '{other}', which tests/test_layering.py does not place in a layer")
        elif LAYER[other] >= LAYER[package]:
            lines.append(
                f"line {line}: '{package}' (layer {LAYER[package]}) imports '{other}' (layer {LAYER[other]}); "
                "move what both need to a lower layer, or pass it in from cli/"
            )
    return lines


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_downwards(file):
    package = package_of(file)
    assert package in LAYER, f"place '{package}' in a layer of tests/test_layering.py"
    assert not violations(package, file.read_text())


@pytest.mark.parametrize(
    ("package", "source", "count"),
    [
        ("train", "import ncp_jax.models.flops\nfrom ncp_jax.train.step import x", 0),
        ("train", "def f():\n    from ncp_jax.evaluate import brier", 1),
        ("generate", "from ncp_jax.train.loop import train", 1),  # the same layer, another package
        ("ops", "from ncp_jax import nn, config", 1),
        ("ops", "from . import rope", 1),
        ("cli", "from ncp_jax.report.build import report\nimport jax", 0),
        ("config", "from ncp_jax.ops.rope import rotate", 1),
    ],
)
def test_the_walk_sees_violations(package, source, count):
    assert len(violations(package, source)) == count
