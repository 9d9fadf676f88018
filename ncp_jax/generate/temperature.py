"""Temperature for samplers that give draws and no probabilities: draws from P^(1/T) / Z by comparing draws.

P is the joint law of a block of K tokens; this is not a softmax temperature per token. CALM, arXiv 2510.27688:
Algorithm 1 (`exact`) waits until independent draws agree, Algorithm 2 (`vote`) counts agreements among N candidates.
Shapes: B rows, K tokens per block, N candidates, W draws per call, X outcomes.
"""

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ncp_jax.config import ConfigError, frozen

# (context, keys [N, B]) -> int [N, B, K]: one block per key, a function of its key and its row of the context alone.
Sample = Callable[[Any, Array], Array]

ROUNDING = 1e-9  # relative: 1 / (1/3) may be 3 - 4e-16, and is 3
SPELLING = 1e-6  # absolute, of T: 0.333333 is how one writes 1/3


class Power(NamedTuple):
    """1 / T = whole + fraction."""

    whole: int
    fraction: float  # in [0, 1)


class Tempered(NamedTuple):
    """One block per row and what it took."""

    tokens_BK: Array
    draws_B: Array  # int32, blocks that the row needed, stopping each attempt at its first disagreement
    full_draws_B: Array  # the same, had every attempt made all its draws: the count of Theorem 2
    exact_B: Array  # bool: the block follows P^(1/T) / Z exactly


class Cost(NamedTuple):
    """Expected draws per block of Algorithm 1."""

    full: float  # every attempt makes all its draws (Theorem 2)
    early_stop: float  # attempts stop at their first disagreement, as `exact` does


@frozen
class Tempering:
    """How blocks are drawn."""

    temperature: float = 1.0
    method: Literal["exact", "vote"] = "exact"
    candidates: int = 200  # of a vote; the official code's number
    max_draws: int = 10_000  # per block, `exact`: then a vote stands in
    at_once: int = 16  # draws per call of the sampler; changes no result

    def __post_init__(self):
        (power if self.method == "exact" else whole_power)(self.temperature)
        for name in ("candidates", "max_draws", "at_once"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


def draw_blocks(sample: Sample, context: Any, keys_B: Array, how: Tempering) -> Tempered:
    """One tempered block per row, by the method asked for. Can be compiled."""
    if how.method == "vote":
        return vote(sample, context, keys_B, how.temperature, candidates=how.candidates, at_once=how.at_once)
    return exact(
        sample, context, keys_B, how.temperature,
        max_draws=how.max_draws, at_once=how.at_once, candidates=how.candidates,
    )  # fmt: skip


def power(temperature: float) -> Power:
    """1 / T for Algorithm 1: any T in (0, 1]. Raises ConfigError outside."""
    _check_range(temperature)
    inverse = 1 / temperature
    whole = math.floor(inverse * (1 + ROUNDING))
    fraction = inverse - whole
    return Power(whole, fraction if fraction > ROUNDING * inverse else 0.0)


def whole_power(temperature: float) -> int:
    """1 / T for Algorithm 2: T = 1/n. Raises ConfigError naming the nearest such T."""
    _check_range(temperature)
    inverse = 1 / temperature
    nearest = min((math.floor(inverse), math.ceil(inverse)), key=lambda n: abs(1 / n - temperature))
    if abs(1 / nearest - temperature) > SPELLING:
        raise ConfigError(
            f"temperature {temperature} is not 1/n for a whole n, and a vote draws from nothing else; "
            f"nearest: {1 / nearest:.6g} (1/{nearest}); method 'exact' takes any temperature in (0, 1]"
        )
    return nearest


def exact(
    sample: Sample, context: Any, keys_B: Array, temperature: float, *,
    max_draws: int = 10_000, at_once: int = 16, candidates: int = 200,
) -> Tempered:  # fmt: skip
    """Algorithm 1 for every row, in step: exact for any T in (0, 1].

    With 1/T = n + a: draw until n draws agree, starting afresh after a disagreement. Then, if a > 0, for i = 1, 2, ..:
    draw once more; equal accepts, else with probability a/i all starts again. That accepts with probability P^a. No
    draw serves twice. Draw d of a row is made with fold_in(key, 2 d), whatever `at_once`, the draws per call of the
    sampler; what is left of a call when its row is done is dropped. a/i has the 23 bits of a uniform float32.

    A row without a block after `max_draws` gets one by `vote` among `candidates` more with n = round(1/T), and is not
    `exact`. A flat law over X blocks needs n X^(n-1) draws; `expected_draws` says what another needs.
    """
    n, fraction = power(temperature)
    state = _search(sample, context, keys_B, Power(n, fraction), max_draws, at_once)
    found = Tempered(state.block_BK, state.draws_B, n * state.attempts_B + state.second_B, state.done_B)

    def stand_in(found: Tempered) -> Tempered:
        keys, nearest = _fold_in(keys_B, 2 * max_draws), max(1, round(1 / temperature))
        voted_BK = _vote(sample, context, keys, nearest, candidates, at_once)
        extra_B = jnp.where(found.exact_B, 0, candidates)
        tokens_BK = jnp.where(found.exact_B[:, None], found.tokens_BK, voted_BK)
        return Tempered(tokens_BK, found.draws_B + extra_B, found.full_draws_B + extra_B, found.exact_B)

    return lax.cond(found.exact_B.all(), lambda found: found, stand_in, found)


def vote(
    sample: Sample, context: Any, keys_B: Array, temperature: float, *,
    candidates: int = 200, at_once: int | None = None,
) -> Tempered:  # fmt: skip
    """Algorithm 2 for T = 1/n: among N candidates per row, a block shared by c of them weighs C(c, n), the number of
    n-subsets that agree on it.

    If none is shared n times, the largest m < n that some block reaches takes n's place, down to a plain draw. So the
    law is P^n / Z only as N grows: for P = (.5, .3, .15, .05), n = 2 it is off by .077, .050, .029, .020 in total
    variation at N = 4, 8, 16, 24. `at_once`: candidates per call of the sampler (None: all); changes no result.
    """
    n = whole_power(temperature)
    tokens_BK = _vote(sample, context, keys_B, n, candidates, at_once)
    draws_B = jnp.full(tokens_BK.shape[0], candidates, jnp.int32)
    return Tempered(tokens_BK, draws_B, draws_B, jnp.full(tokens_BK.shape[0], n == 1))


def vote_weights(candidates_NK: Array, n: int) -> tuple[Array, Array]:
    """(log weight of each candidate [N], order m that was used) among the N candidates of one row.

    Each of the c members of a block carries C(c, m) / c, up to a factor common to all, so that choosing a member is
    choosing a block. -inf where c < m.
    """
    # Token by token: one elementwise mask under one sum, which XLA fuses; [N, N, K] never exists.
    same_NN = reduce(jnp.logical_and, [token_N[:, None] == token_N for token_N in candidates_NK.T])
    count_N = same_NN.sum(axis=-1)
    order = jnp.minimum(n, count_N.max())
    # log [c (c-1) .. (c-m+1) / c]; m! is common to all. Terms, not log-gammas: those cancel in float32.
    log_weight_N = jnp.zeros(count_N.shape)
    for taken in range(1, n):
        term_N = jnp.where(count_N > taken, jnp.log(jnp.maximum(count_N - taken, 1)), -jnp.inf)
        log_weight_N += jnp.where(taken < order, term_N, 0)
    return log_weight_N, order


def expected_draws(p_X: np.ndarray, temperature: float) -> Cost:
    """Expected draws of Algorithm 1 when blocks have the probabilities p. Theorem 2, with 1/T = n + a:

        (n + 1{a > 0} sum_x p^(1/T - 1)) / sum_x p^(1/T)

    An attempt that stops at its first disagreement makes 1 + sum_{k=1}^{n-1} sum_x p^k draws instead of n.
    """
    p_X = np.asarray(p_X, np.float64)
    if (p_X < 0).any() or not math.isclose(p_X.sum(), 1, rel_tol=1e-6):
        raise ConfigError(f"probabilities must be >= 0 and sum to 1, got a sum of {p_X.sum():.6g}")
    p_X = p_X[p_X > 0]
    n, fraction = power(temperature)
    inverse = n + fraction
    second = float((p_X ** (inverse - 1)).sum()) if fraction else 0.0
    first = 1 + sum(float((p_X**k).sum()) for k in range(1, n))
    accepted = float((p_X**inverse).sum())
    return Cost((n + second) / accepted, (first + second) / accepted)


class _State(NamedTuple):
    """Where each row of Algorithm 1 stands."""

    block_BK: Array
    agreeing_B: Array  # draws that agree, 0..n; n: second stage
    tries_B: Array  # second-stage draws of this attempt
    attempts_B: Array
    second_B: Array  # second-stage draws of all attempts
    draws_B: Array
    done_B: Array


def _search(sample: Sample, context: Any, keys_B: Array, how: Power, max_draws: int, at_once: int) -> _State:
    """Both stages, `at_once` draws per call of the sampler, until every row is done or has had its draws."""
    n, fraction = how
    at_once = 1 if how == (1, 0) else at_once  # the first draw is accepted
    first = jax.eval_shape(sample, context, keys_B[None])
    B, K = first.shape[1:]
    zero_B = jnp.zeros(B, jnp.int32)
    start = _State(jnp.zeros((B, K), first.dtype), zero_B, zero_B, zero_B, zero_B, zero_B, jnp.zeros(B, bool))

    def unfinished(carry: tuple[Array, _State]) -> Array:
        return (carry[0] < max_draws) & ~carry[1].done_B.all()

    def call(carry: tuple[Array, _State]) -> tuple[Array, _State]:
        number_W = carry[0] + jnp.arange(at_once, dtype=jnp.int32)
        draw_WBK = sample(context, _each_key(keys_B, 2 * number_W))
        uniform_WB = jnp.zeros(draw_WBK.shape[:2])
        if fraction:
            uniform_WB = jax.vmap(jax.vmap(jax.random.uniform))(_each_key(keys_B, 2 * number_W + 1))
        take = partial(_take_draw, n=n, fraction=fraction)
        state, _ = lax.scan(take, carry[1], (draw_WBK, uniform_WB, number_W < max_draws))
        return carry[0] + at_once, state

    return lax.while_loop(unfinished, call, (jnp.int32(0), start))[1]


def _take_draw(state: _State, drawn: tuple[Array, Array, Array], *, n: int, fraction: float) -> tuple[_State, None]:
    """One draw for every row that is not done."""
    draw_BK, uniform_B, allowed = drawn
    live_B = ~state.done_B & allowed
    opening_B, second_B = state.agreeing_B == 0, state.agreeing_B == n
    same_B = (draw_BK == state.block_BK).all(axis=-1)
    agreeing_B = jnp.where(opening_B | same_B, state.agreeing_B + 1, 0)
    tries_B = state.tries_B + 1
    restart_B = second_B & ~same_B & (uniform_B * tries_B < fraction)
    done_B = jnp.where(second_B, same_B, (agreeing_B == n) & (fraction == 0))
    new = _State(
        block_BK=jnp.where(opening_B[:, None], draw_BK, state.block_BK),
        agreeing_B=jnp.where(second_B, jnp.where(restart_B, 0, n), agreeing_B),
        tries_B=jnp.where(second_B & ~restart_B, tries_B, 0),
        attempts_B=state.attempts_B + opening_B,
        second_B=state.second_B + second_B,
        draws_B=state.draws_B + 1,
        done_B=done_B,
    )
    return jax.tree.map(lambda new, old: jnp.where(_rows(live_B, new), new, old), new, state), None


def _vote(sample: Sample, context: Any, keys_B: Array, n: int, candidates: int, at_once: int | None) -> Array:
    """Blocks [B, K] chosen among candidates that are drawn `at_once` at a time."""
    W = min(at_once or candidates, candidates)
    number_gW = jnp.arange(-(-candidates // W) * W).reshape(-1, W)
    drawn_gWBK = lax.map(lambda number_W: sample(context, _each_key(keys_B, number_W)), number_gW)
    drawn_NBK = drawn_gWBK.reshape(-1, *drawn_gWBK.shape[2:])[:candidates]

    def choose(candidates_NK: Array, key: Array) -> Array:
        log_weight_N, _ = vote_weights(candidates_NK, n)
        return candidates_NK[jax.random.categorical(key, log_weight_N)]

    return jax.vmap(choose, in_axes=(1, 0))(drawn_NBK, _fold_in(keys_B, candidates))


def _each_key(keys_B: Array, number_W: Array) -> Array:
    """[W, B]."""
    return jax.vmap(partial(_fold_in, keys_B))(number_W)


def _fold_in(keys_B: Array, number: Array | int) -> Array:
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys_B)


def _rows(flag_B: Array, like: Array) -> Array:
    return flag_B.reshape(flag_B.shape + (1,) * (like.ndim - 1))


def _check_range(temperature: float) -> None:
    if not temperature > 0:
        raise ConfigError(
            f"temperature {temperature} cannot be had from draws: it must be in (0, 1]; the smaller, the more draws. "
            "Nearest in practice: 0.1"
        )
    if temperature > 1:
        raise ConfigError(
            f"temperature {temperature} flattens the law, which agreeing draws cannot do; nearest: 1 (the model's own)"
        )
