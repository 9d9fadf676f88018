"""The leaf table: for every parameter its role, its optimizer, the axes of its matrix, its rate and its decay.

Rules are regular expressions on the '/'-joined path, tried in order; each leaf takes the first that matches the whole
path, and a leaf that none matches is an error. Shapes alone decide nothing: a stacked norm scale is two-dimensional,
a stacked kernel three- or four-dimensional, and an embedding looks like a matrix.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax

from ncp_jax.config import ConfigError, frozen
from ncp_jax.optim.config import OptimConfig
from ncp_jax.optim.muon import Matrix, path_name

Optimizer = Literal["muon", "adamw", "frozen"]


class LeafError(ValueError):
    """A parameter that no rule covers, or whose rule does not fit its shape. The message names the leaf."""


@frozen
class LeafRule:
    """What to do with the leaves whose path matches `pattern` as a whole.

    `matrix` names (in_axes, out_axes) from the end, so that stacked leading axes (layers, segments) are batch axes.
    """

    pattern: str
    role: str
    optimizer: Optimizer
    matrix: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    decay: Literal["group", "embedding", "none"] = "group"  # which weight decay of OptimConfig applies
    head_axis: int | None = None  # with per_head_qk this axis leaves the matrix: every head is one

    def __post_init__(self):
        if self.optimizer == "muon" and self.matrix is None:
            raise ConfigError(f"leaf rule '{self.pattern}' names muon without matrix axes; add matrix=(in, out)")
        axes = [axis for side in self.matrix or () for axis in side]
        if any(axis >= 0 for axis in axes) or len(set(axes)) != len(axes):
            raise ConfigError(f"leaf rule '{self.pattern}' has matrix {self.matrix}; use distinct axes from the end")


@frozen
class Leaf:
    """One parameter of the table. `learning_rate` is the peak of its group; rate and decay of a frozen leaf are 0."""

    path: str
    shape: tuple[int, ...]
    role: str
    optimizer: Optimizer
    in_axes: tuple[int, ...]  # counted from 0; empty unless the leaf is made of matrices
    out_axes: tuple[int, ...]
    batch_axes: tuple[int, ...]
    learning_rate: float
    weight_decay: float

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix(self) -> Matrix | None:
        return Matrix(self.in_axes, self.out_axes, self.batch_axes) if self.in_axes else None


_MATRIX = ((-2,), (-1,))  # [..., in, out]

# Parameters of the transformer towers, the concept module and the routes. What does not decay: norms, biases, gates,
# diagonals and other vectors or scalars; embeddings have a decay of their own, 0 in the report's recipe.
TRANSFORMER_RULES: tuple[LeafRule, ...] = (
    LeafRule(r"(.*/)?w[qk]", "query_key", "muon", ((-3,), (-2, -1)), head_axis=-2),  # [.., D, heads, h]
    LeafRule(r"(.*/)?wv", "value", "muon", ((-3,), (-2, -1))),
    LeafRule(r"(.*/)?wo", "attention_out", "muon", ((-3, -2), (-1,))),  # [.., heads, h, D]
    LeafRule(r"(.*/)?w_(gate|up|down)", "mlp", "muon", _MATRIX),
    LeafRule(r"(.*/)?concept/heads/kernel", "concept_head", "muon", _MATRIX),  # [S, D, N]: one matrix per segment
    LeafRule(r"(.*/)?concept/heads/bias", "bias", "adamw", decay="none"),
    LeafRule(r"(.*/)?codebook/codes", "codebook", "adamw"),
    LeafRule(r"(.*/)?embed/table", "embedding", "adamw", decay="embedding"),
    LeafRule(r"(.*/)?head/kernel", "head", "adamw"),
    LeafRule(r"(.*/)?(irc|read_encoder|read_concept)_\d+/w[12]", "route_matrix", "adamw"),
    LeafRule(r"(.*/)?irc_\d+/static", "route_vector", "adamw", decay="none"),
    LeafRule(r"(.*/)?(read_encoder|read_concept|reinject)_\d+/diagonal", "route_vector", "adamw", decay="none"),
    LeafRule(r"(.*/)?(gate_logits|fusion_scale)", "gate", "adamw", decay="none"),
    LeafRule(r"(.*/)?\w*norm(/scale|/bias)?", "norm", "adamw", decay="none"),
    LeafRule(r"(.*/)?reinject_\d+/norm_(scale|bias)", "norm", "adamw", decay="none"),
    LeafRule(r"(.*/)?bias", "bias", "adamw", decay="none"),
)


def leaf_table(params_abstract: Any, rules: Sequence[LeafRule], config: OptimConfig) -> list[Leaf]:
    """One Leaf per parameter, in tree order.

    Args:
        params_abstract: parameters, or anything with their structure and shapes (jax.eval_shape).
        rules: tried in order; a rule that matches nothing is allowed.
    With config.optimizer 'adamw', leaves of muon rules take AdamW with adam_learning_rate and adam_weight_decay.
    Raises LeafError naming every leaf without a rule, or one whose rule needs more axes than it has.
    """
    paths = jax.tree_util.tree_flatten_with_path(params_abstract)[0]
    named = [(path_name(path), tuple(leaf.shape)) for path, leaf in paths]
    chosen = [(name, shape, _first(name, rules)) for name, shape in named]
    orphans = [f"{name} {list(shape)}" for name, shape, rule in chosen if rule is None]
    if orphans:
        raise LeafError(
            f"no optimizer rule matches {len(orphans)} of {len(named)} parameters: {', '.join(orphans)}; "
            "add a LeafRule that says which optimizer trains them"
        )
    return [_leaf(name, shape, rule, config) for name, shape, rule in chosen if rule is not None]


def format_table(leaves: Sequence[Leaf]) -> str:
    """The table as text, for a dry run: one block per optimizer, in tree order.

    Leaves that differ only in numbers of their path (layers of an unrolled tower) share a line; `a..b` is a range.
    """
    lines = []
    for optimizer in ("muon", "adamw", "frozen"):
        group = [leaf for leaf in leaves if leaf.optimizer == optimizer]
        if not group:
            continue
        rate = "" if optimizer == "frozen" else f", peak learning rate {group[0].learning_rate:g}"
        size = sum(leaf.size for leaf in group)
        lines.append(f"{optimizer}: {len(group)} leaves, {size:,} parameters{rate}")
        lines += _aligned([("path", "leaves", "shape", "role", "matrix", "decay"), *map(_row, _siblings(group))])
    return "\n".join(lines)


def _first(name: str, rules: Iterable[LeafRule]) -> LeafRule | None:
    return next((rule for rule in rules if re.fullmatch(rule.pattern, name)), None)


def _leaf(name: str, shape: tuple[int, ...], rule: LeafRule, config: OptimConfig) -> Leaf:
    optimizer: Optimizer = "adamw" if rule.optimizer == "muon" and config.optimizer == "adamw" else rule.optimizer
    matrix = _axes(name, shape, rule, config.per_head_qk) if rule.matrix and optimizer == "muon" else Matrix((), ())
    if optimizer == "frozen":
        return Leaf(name, shape, rule.role, optimizer, (), (), (), 0.0, 0.0)
    rate, decay = (
        (config.muon_learning_rate, config.muon_weight_decay)
        if optimizer == "muon"
        else (config.adam_learning_rate, config.adam_weight_decay)
    )
    decay = {"group": decay, "embedding": config.embedding_weight_decay, "none": 0.0}[rule.decay]
    return Leaf(name, shape, rule.role, optimizer, matrix.in_axes, matrix.out_axes, matrix.batch_axes, rate, decay)


def _axes(name: str, shape: tuple[int, ...], rule: LeafRule, per_head_qk: bool) -> Matrix:
    assert rule.matrix
    sides = [tuple(a for a in side if not (per_head_qk and a == rule.head_axis)) for side in rule.matrix]
    if -min(axis for side in rule.matrix for axis in side) > len(shape):
        raise LeafError(f"parameter {name} {list(shape)} has {len(shape)} axes; its rule needs the axes {rule.matrix}")
    inside, outside = (tuple(len(shape) + axis for axis in side) for side in sides)
    return Matrix(inside, outside, tuple(a for a in range(len(shape)) if a not in inside + outside))


def _siblings(group: Sequence[Leaf]) -> list[list[Leaf]]:
    families: dict[tuple, list[Leaf]] = {}
    for leaf in group:
        key = (_numberless(leaf.path), leaf.role, leaf.matrix, leaf.weight_decay, len(leaf.shape))
        families.setdefault(key, []).append(leaf)
    return list(families.values())


def _row(family: list[Leaf]) -> tuple[str, ...]:
    first = family[0]
    path = first.path if len(family) == 1 else _numberless(first.path)
    axes = [_range(sizes) for sizes in zip(*(leaf.shape for leaf in family), strict=True)]
    matrix = ""
    if first.matrix:
        batch, inside, outside = (
            " x ".join(axes[a] for a in side) for side in (first.batch_axes, first.in_axes, first.out_axes)
        )
        matrix = f"{batch or 1} of ({inside} -> {outside})"
    return path, str(len(family)), f"[{', '.join(axes)}]", first.role, matrix, f"{first.weight_decay:g}"


def _numberless(path: str) -> str:
    return re.sub(r"(?<=[_/])\d+(?=/|$)", "*", path)


def _range(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if min(sizes) == max(sizes) else f"{min(sizes)}..{max(sizes)}"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
