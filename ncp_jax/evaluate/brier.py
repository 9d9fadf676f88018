"""BrierLM reports: scores of positions become figures with errors, and the protocol that they hold under.

A figure means nothing without its protocol: another block size alone moves BrierLM by a third, and another chunk or
tokenizer changes what is predicted. Shapes: N rows, S starts of a row, P scored positions, n n-gram lengths 1..4.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ncp_jax.config import frozen, to_dict
from ncp_jax.evaluate.brier_rows import Rows
from ncp_jax.ops.scoring import (
    LENGTHS,
    SCALE,
    BrierLM,
    ScoreError,
    brier_lm,
    clustered_covariance,
    geometric_mean,
    influence,
    official_aggregate,
)

Cluster = Literal["document", "row"]


@frozen
class Protocol:
    """How positions were scored."""

    model: str
    tokenizer: str
    dtype: str
    packing: str
    block: int  # tokens per row; contexts start where rows do
    chunk: int | None  # tokens per sampled block
    rows: int
    starts: str  # "every token" | "blocks of K"
    first_start: int  # first predicted token of a row, from 0
    samples: int | None  # per block; None: probabilities
    estimator: str  # all | official | exact
    seed: int


class Scores(NamedTuple):
    """Parts of every scored position, float64 [P, n], and where in the text it is."""

    accuracy_Pn: np.ndarray
    collision_Pn: np.ndarray
    row_P: np.ndarray
    start_P: np.ndarray
    document_P: np.ndarray
    protocol: Protocol

    @property
    def brier_Pn(self) -> np.ndarray:
        return 2 * self.accuracy_Pn - self.collision_Pn


@dataclasses.dataclass(frozen=True)
class Report:
    """Figures times 100, for n = 1..4. A figure that does not exist is None and `status` says why."""

    brier_n: list[float]
    error_n: list[float] | None  # standard errors, positions of one cluster taken as dependent
    accuracy_n: list[float]
    collision_n: list[float]
    accuracy: float  # geometric means over n
    collision: float
    brierlm: BrierLM
    brierlm_official: float  # the official aggregate, scale 0..1
    positions: int
    clusters: int
    cluster: Cluster
    protocol: Protocol

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, the protocol included."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return plain | {"brierlm": self.brierlm._asdict(), "protocol": to_dict(self.protocol)}

    def __str__(self) -> str:
        return "\n".join([self._headline(), *self._table(), *self._protocol_lines()])

    def _headline(self) -> str:
        found = self.brierlm
        if found.value is None:
            return f"BrierLM: none ({found.status})"
        caution = "" if found.status == "ok" else f" ({found.status})"
        return f"BrierLM {_with_error(found.value, found.error)}{caution}"

    def _table(self) -> list[str]:
        errors: Sequence[float | None] = self.error_n or [None] * LENGTHS
        return [
            f"  Brier-{n + 1} {_with_error(self.brier_n[n], errors[n]):>18}"
            f"   accuracy {self.accuracy_n[n]:8.4f}   collision {self.collision_n[n]:8.4f}"
            for n in range(LENGTHS)
        ]

    def _protocol_lines(self) -> list[str]:
        p = self.protocol
        draws = "probabilities" if p.samples is None else f"{p.samples} samples per block (estimator {p.estimator})"
        return [
            f"  {p.model}, tokenizer {p.tokenizer}, {p.dtype}, {draws}, seed {p.seed}",
            f"  {p.rows} rows of {p.block} tokens ({p.packing} packing), scored at {p.starts}, first {p.first_start}",
            f"  {self.positions} positions in {self.clusters} clusters (by {self.cluster}), all figures times {SCALE}",
        ]


class Difference(NamedTuple):
    """BrierLM of one model less another's on the same positions; the error is of the difference."""

    value: float | None
    error: float | None
    status: str


def gather(
    rows: Rows, start_S: np.ndarray, counted_NS: np.ndarray, accuracy_NSn: np.ndarray, collision_NSn: np.ndarray,
    protocol: Protocol,
) -> Scores:  # fmt: skip
    """Scores from the parts of all rows. Raises ScoreError if nothing is counted."""
    if not counted_NS.any():
        raise ScoreError(
            f"no position of {protocol.rows} rows of {protocol.block} tokens has {LENGTHS} real tokens to predict at "
            f"{protocol.starts}; give longer documents or a smaller chunk"
        )
    row_P, place_P = np.nonzero(counted_NS)
    start_P = start_S[place_P]
    accuracy_Pn, collision_Pn = (a[counted_NS].astype(np.float64) for a in (accuracy_NSn, collision_NSn))
    return Scores(accuracy_Pn, collision_Pn, row_P, start_P, rows.document_NT[row_P, start_P], protocol)


def summarise(scores: Scores, cluster: Cluster = "document") -> Report:
    """The figures of all positions. With fewer than two clusters there is no error, and the status says so."""
    value_Pn, cluster_P = scores.brier_Pn, _clusters(scores, cluster)
    clusters = len(np.unique(cluster_P))
    covariance = clustered_covariance(value_Pn, cluster_P) if clusters > 1 else None
    brier_n, accuracy_n, collision_n = (a.mean(axis=0) for a in (value_Pn, scores.accuracy_Pn, scores.collision_Pn))
    found = brier_lm(brier_n, covariance)
    if covariance is None and found.value is not None:
        found = found._replace(status=f"no error: all positions lie in one {cluster}; score more text")
    return Report(
        brier_n=_scaled(brier_n), error_n=None if covariance is None else _scaled(np.sqrt(np.diag(covariance))),
        accuracy_n=_scaled(accuracy_n), collision_n=_scaled(collision_n), accuracy=SCALE * geometric_mean(accuracy_n),
        collision=SCALE * geometric_mean(collision_n), brierlm=found, brierlm_official=official_aggregate(brier_n),
        positions=len(value_Pn), clusters=clusters, cluster=cluster, protocol=scores.protocol,
    )  # fmt: skip


def compare(ours: Scores, theirs: Scores, cluster: Cluster = "document") -> Difference:
    """BrierLM difference on identical positions, its error by pairs: what both find hard cancels.

    Raises ScoreError when positions or tokenizers differ, or lie in one cluster.
    """
    _check_same_positions(ours, theirs)
    totals = [brier_lm(scores.brier_Pn.mean(axis=0)) for scores in (ours, theirs)]
    for total, scores in zip(totals, (ours, theirs), strict=True):
        if total.value is None:
            return Difference(None, None, f"{scores.protocol.model}: {total.status}")
    moves_P = influence(ours.brier_Pn) - influence(theirs.brier_Pn)
    variance = clustered_covariance(moves_P[:, None], _clusters(ours, cluster))[0, 0]
    first, second = (float(total.value or 0.0) for total in totals)
    return Difference(first - second, float(np.sqrt(variance)), "ok")


def _check_same_positions(ours: Scores, theirs: Scores) -> None:
    a, b = ours.protocol, theirs.protocol
    if a.tokenizer != b.tokenizer:
        raise ScoreError(f"tokenizers differ ({a.tokenizer}, {b.tokenizer}): tokens, and so scores, mean other things")
    same = len(ours.row_P) == len(theirs.row_P) and all(
        np.array_equal(getattr(ours, name), getattr(theirs, name)) for name in ("row_P", "start_P", "document_P")
    )
    if a.block != b.block or a.packing != b.packing or not same:
        raise ScoreError(
            f"positions differ: {len(ours.row_P)} at {a.starts} of {a.block}-token rows against {len(theirs.row_P)} at "
            f"{b.starts} of {b.block}-token rows; score the same rows, next-token models with starts='blocks'"
        )


def _clusters(scores: Scores, cluster: Cluster) -> np.ndarray:
    return scores.document_P if cluster == "document" else scores.row_P


def _scaled(value_n: np.ndarray) -> list[float]:
    return [SCALE * float(value) for value in value_n]


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")
