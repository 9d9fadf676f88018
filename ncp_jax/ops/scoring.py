"""BrierLM: what a language model's samples, or its probabilities, score against the true next tokens.

Brier-n of a position whose next n tokens are y, under the model's law P of n-grams, is 2 P(y) - sum_x P(x)^2: an
accuracy and a collision. It is strictly proper. It needs no likelihood: with independent samples x, 1{x = y} is
unbiased for P(y) and 1{x = x'} for the collision. BrierLM is the geometric mean over n = 1..4. CALM, arXiv 2510.27688.

Shapes: R samples, P positions, K tokens per sampled block, s blocks in a row, n n-gram lengths 1..4, G clusters.
Positions are scored by jax functions; what is taken over all of them is float64 NumPy, once, on the host.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

LENGTHS = 4  # the metric's n-grams: 1..4
SCALE = 100  # published figures are 100 times the geometric mean; the official code prints it bare
UNRELIABLE = 2.0  # a component this many standard errors from 0, or fewer, gets a warning


class ScoreError(ValueError):
    """Scores that cannot be computed or compared. The message names the value and the remedy."""


class Parts(NamedTuple):
    """Unbiased estimates of P(y) and of sum_x P(x)^2, [P, n] each. Their Brier-n is 2 accuracy - collision."""

    accuracy: Array
    collision: Array

    @property
    def brier(self) -> Array:
        return 2 * self.accuracy - self.collision


class BrierLM(NamedTuple):
    """The geometric mean, times 100; None where it does not exist, with the reason in `status` ("ok" otherwise)."""

    value: float | None
    error: float | None  # standard error, delta method
    bias: float | None  # expected error of the geometric mean of unbiased estimates, second order; not subtracted
    status: str


def prefix_match(a_K: Array, b_K: Array) -> Array:
    """[..., K] bool: the first k + 1 tokens agree."""
    return jnp.cumprod(a_K == b_K, axis=-1, dtype=jnp.int32).astype(bool)


def match_rate(samples_RPK: Array, target_PK: Array) -> Array:
    """Share of samples whose first k + 1 tokens are the target's, [P, K]: unbiased for P(y)."""
    return prefix_match(samples_RPK, target_PK).mean(axis=0)


def pair_rate(samples_RPK: Array) -> Array:
    """Share of sample pairs whose first k + 1 tokens agree, [P, K]: the U-statistic of the collision, R >= 2.

    One sample at a time against all others: memory grows with R, not R^2.
    """
    R = samples_RPK.shape[0]
    if R < 2:
        raise ScoreError(f"a collision needs at least 2 samples per position, got {R}; draw more")
    agreeing_RPK = lax.map(lambda one_PK: prefix_match(one_PK, samples_RPK).sum(axis=0), samples_RPK)
    return (agreeing_RPK.sum(axis=0) - R) / (R * (R - 1))  # less R: every sample agrees with itself


def leader_rate(samples_RPK: Array) -> Array:
    """Share of the other samples that equal the first one, [P]: the weight of a path that goes on along it."""
    return (samples_RPK[1:] == samples_RPK[0]).all(axis=-1).mean(axis=0)


def chain(rate_PsK: Array, whole_Ps: Array) -> Array:
    """n-gram rates [P, 4] over s consecutive blocks: rate_j times the product of `whole` over the blocks before j.

    rate: of the first k + 1 tokens within each block, given the blocks before; whole: of each block, on the path taken.
    """
    through_Ps = jnp.cumprod(whole_Ps, axis=-1)
    before_Ps = jnp.concatenate([jnp.ones_like(through_Ps[..., :1]), through_Ps[..., :-1]], axis=-1)
    return (before_Ps[..., None] * rate_PsK).reshape(*rate_PsK.shape[:-2], -1)[..., :LENGTHS]


def sample_parts(samples_RPK: Array, target_PK: Array) -> Parts:
    """Parts of one block of K >= 4 tokens from R >= 2 samples, all of them used. R = 2 is the official estimator."""
    if samples_RPK.shape[-1] < LENGTHS:
        raise ScoreError(
            f"blocks of {samples_RPK.shape[-1]} tokens hold no {LENGTHS}-gram; chain them (evaluate/blocks.py does)"
        )
    return Parts(match_rate(samples_RPK, target_PK)[..., :LENGTHS], pair_rate(samples_RPK)[..., :LENGTHS])


def clustered_covariance(value_Pn: np.ndarray, cluster_P: np.ndarray) -> np.ndarray:
    """Covariance of the means over positions, [n, n], when positions of one cluster may depend on each other.

        G / (G - 1) sum_g S_g S_g^T / P^2,   S_g = sum_{p in g} (value_p - mean)

    One cluster per position gives the usual covariance of a mean. Raises ScoreError for fewer than two clusters.
    """
    value_Pn = np.asarray(value_Pn, np.float64)
    names, place_P = np.unique(cluster_P, return_inverse=True)
    G = len(names)
    if G < 2:
        raise ScoreError(f"{G} cluster(s) among {len(value_Pn)} positions tell nothing of the error; score more text")
    sum_Gn = np.zeros((G, value_Pn.shape[1]))
    np.add.at(sum_Gn, place_P, value_Pn - value_Pn.mean(axis=0))
    return G / (G - 1) * sum_Gn.T @ sum_Gn / len(value_Pn) ** 2


def brier_lm(brier_n: np.ndarray, covariance_nn: np.ndarray | None = None) -> BrierLM:
    """100 (B_1 B_2 B_3 B_4)^(1/4), and with the joint covariance of the B_n its error.

    The four are strongly correlated, so single errors do not do: gradient BrierLM / (4 B_n). A component that is not
    positive leaves no geometric mean: value None. One within two errors of 0 leaves a value with a warning.
    """
    brier_n = np.asarray(brier_n, np.float64)
    error_n = np.zeros_like(brier_n) if covariance_nn is None else np.sqrt(np.diag(covariance_nn))
    bad = [_component(n, brier_n, error_n) for n in range(len(brier_n)) if not brier_n[n] > 0]
    if bad:
        return BrierLM(None, None, None, f"{', '.join(bad)} not positive: score more text, or train further")
    value = SCALE * float(np.exp(np.log(brier_n).mean()))
    if covariance_nn is None:
        return BrierLM(value, None, None, "ok")
    relative_nn = covariance_nn / np.outer(brier_n, brier_n)
    N = len(brier_n)
    error = value / N * math.sqrt(max(float(relative_nn.sum()), 0.0))
    # Second-order term of exp(mean log): 1/2 [ sum_ij C_ij / N^2 - sum_i C_ii / N ] with C relative to B_i B_j.
    bias = value * (relative_nn.sum() / N**2 - np.trace(relative_nn) / N) / 2
    weak = [_component(n, brier_n, error_n) for n in range(len(brier_n)) if brier_n[n] < UNRELIABLE * error_n[n]]
    status = f"unreliable: {', '.join(weak)} within {UNRELIABLE:g} standard errors of 0" if weak else "ok"
    return BrierLM(value, error, float(bias), status)


def official_aggregate(brier_n: np.ndarray) -> float:
    """max(B_1 B_2 B_3 B_4, 0)^(1/4) as the official code computes it, scale 0..1.

    For parity alone: an even number of negative components passes, and a model that is always wrong scores 1.
    """
    return max(float(np.prod(np.asarray(brier_n, np.float64))), 0.0) ** (1 / LENGTHS)


def geometric_mean(rate_n: np.ndarray) -> float:
    """Of accuracies or collisions, which cannot be negative; 0 if one is."""
    return float(np.prod(np.asarray(rate_n, np.float64)) ** (1 / len(rate_n)))


def influence(value_Pn: np.ndarray) -> np.ndarray:
    """How each position moves BrierLM, [P], mean 0: BrierLM / 4 sum_n (value_pn - B_n) / B_n. Needs all B_n > 0."""
    value_Pn = np.asarray(value_Pn, np.float64)
    mean_n = value_Pn.mean(axis=0)
    value = brier_lm(mean_n).value
    if value is None:
        raise ScoreError(brier_lm(mean_n).status)
    return value * (value_Pn / mean_n - 1).mean(axis=1)


def _component(n: int, brier_n: np.ndarray, error_n: np.ndarray) -> str:
    error = f" (standard error {error_n[n]:.3g})" if error_n[n] > 0 else ""
    return f"Brier-{n + 1} = {brier_n[n]:.4g}{error}"
