"""Temperature for samplers that give draws and no probabilities: draws from P^(1/T) / Z by comparing draws.

P is the joint law of a block of K tokens; this is not a softmax temperature per token. CALM, arXiv 2510.27688:
Algorithm 1 (`exact`) waits until independent draws agree, Algorithm 2 (`vote`) counts agreements among N candidates.
Shapes: B rows, K tokens per block, N candidates, W draws per call, X outcomes.
"""

import math
from functools import partial, reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ncp_jax.config import ConfigError, frozen
from ncp_jax.generate.spelling import Outlined, Sample, outlines, spelt

AT_ONCE = 16
TOGETHER = 4096  # outlines in one call, over all rows: they are small
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


class Begun(NamedTuple):
    """How each row's block begins: its first `known` tokens are given."""

    tokens_BK: Array
    known_B: Array  # 0..K


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
    at_once: int | None = None  # draws that are spelt out together; None: AT_ONCE. Changes no result

    def __post_init__(self):
        (power if self.method == "exact" else whole_power)(self.temperature)
        for name in ("candidates", "max_draws", "at_once"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


def draw_blocks(
    sample: Sample, context: Any, keys_B: Array, how: Tempering, live_B: Array | None = None, begun: Begun | None = None
) -> Tempered:
    """One tempered block per row, by the method asked for. Can be compiled.

    Rows that are not `live` cost no draws and get zeros. Blocks that have `begun` are drawn by Algorithm 1 whatever the
    method: few of a vote's candidates would agree with the beginning. So is a vote at T = 1, which is one draw.
    """
    method = "vote" if how.method == "vote" and begun is None and whole_power(how.temperature) > 1 else "exact"
    at_once = how.at_once or AT_ONCE
    if method == "vote":
        return vote(sample, context, keys_B, how.temperature, candidates=how.candidates, at_once=at_once, live_B=live_B)
    return exact(
        sample, context, keys_B, how.temperature,
        max_draws=how.max_draws, at_once=at_once, candidates=how.candidates, live_B=live_B, begun=begun,
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
    live_B: Array | None = None, begun: Begun | None = None,
) -> Tempered:  # fmt: skip
    """Algorithm 1 for every row, in step: exact for any T in (0, 1].

    With 1/T = n + a: draw until n draws agree, starting afresh after a disagreement. Then, if a > 0, for i = 1, 2, ..:
    draw once more; equal accepts, else with probability a/i all starts again. That accepts with probability P^a. No
    draw serves twice. Draw d of a row is made with fold_in(key, 2 d), whatever `at_once`, the draws per call of the
    sampler; what is left of a call when its row is done is dropped. a/i has the 23 bits of a uniform float32.

    A block that has `begun` is drawn from P^(1/T) among the blocks that begin so: draws that do not count for nothing.

    A row without a block after `max_draws` gets one by `vote` among `candidates` more with n = round(1/T), and is not
    `exact`; of a block that has begun, among those that agree with its beginning the longest, which is then put right.
    A flat law over X blocks needs n X^(n-1) draws; `expected_draws` says what another needs. A beginning of
    probability p multiplies that by 1/p.
    """
    n, fraction = power(temperature)
    live_B = jnp.ones(keys_B.shape[0], bool) if live_B is None else live_B
    if (n, fraction) == (1, 0) and begun is None:  # any draw is accepted, so the search and its stand-in fall away
        outline_1BK = outlines(sample, context, _each_key(keys_B, jnp.zeros(1, jnp.int32)))
        tokens_BK = spelt(sample, outline_1BK, live_B[None], at_once)[0]
        draws_B = live_B.astype(jnp.int32)
        return Tempered(jnp.where(live_B[:, None], tokens_BK, 0), draws_B, draws_B, jnp.ones_like(live_B))
    state = _search(sample, context, keys_B, Power(n, fraction), max_draws, at_once, live_B, begun)
    found = Tempered(state.block_BK, state.draws_B, n * state.attempts_B + state.second_B, state.done_B)

    def stand_in(found: Tempered) -> Tempered:
        keys, nearest, missing_B = _fold_in(keys_B, 2 * max_draws), max(1, round(1 / temperature)), ~found.exact_B
        voted_BK = _vote(sample, context, keys, nearest, candidates, at_once, missing_B, begun)
        extra_B = jnp.where(missing_B, candidates, 0)
        tokens_BK = jnp.where(missing_B[:, None], voted_BK, found.tokens_BK)
        return Tempered(tokens_BK, found.draws_B + extra_B, found.full_draws_B + extra_B, found.exact_B)

    return lax.cond(found.exact_B.all(), lambda found: found, stand_in, found)


def vote(
    sample: Sample, context: Any, keys_B: Array, temperature: float, *,
    candidates: int = 200, at_once: int | None = None, live_B: Array | None = None,
) -> Tempered:  # fmt: skip
    """Algorithm 2 for T = 1/n: among N candidates per row, a block shared by c of them weighs C(c, n), the number of
    n-subsets that agree on it.

    If none is shared n times, the largest m < n that some block reaches takes n's place, down to a plain draw. So the
    law is P^n / Z only as N grows: for P = (.5, .3, .15, .05), n = 2 it is off by .077, .050, .029, .020 in total
    variation at N = 4, 8, 16, 24. `at_once`: candidates per call of the sampler (None: all); changes no result.
    """
    n = whole_power(temperature)
    live_B = jnp.ones(keys_B.shape[0], bool) if live_B is None else live_B
    tokens_BK = _vote(sample, context, keys_B, n, candidates, at_once, live_B, None)
    draws_B = jnp.where(live_B, candidates, 0)
    return Tempered(tokens_BK, draws_B, draws_B, live_B & (n == 1))


def vote_weights(candidates_NK: Array, n: int) -> tuple[Array, Array]:
    """(log weight of each candidate [N], order m that was used) among the N candidates of one row.

    Each of the c members of a block carries C(c, m) / c, up to a factor common to all, so that choosing a member is
    choosing a block. -inf where c < m.
    """
    count_N = _shared(candidates_NK)
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


def _shared(candidates_NK: Array) -> Array:
    """How many of the candidates each one equals, [N], itself included."""
    # Token by token: one elementwise mask under one sum, which XLA fuses; [N, N, K] never exists.
    same_NN = reduce(jnp.logical_and, [token_N[:, None] == token_N for token_N in candidates_NK.T])
    return same_NN.sum(axis=-1)


class _State(NamedTuple):
    """Where each row of Algorithm 1 stands."""

    block_BK: Array
    agreeing_B: Array  # draws that agree, 0..n; n: second stage
    tries_B: Array  # second-stage draws of this attempt
    attempts_B: Array
    second_B: Array  # second-stage draws of all attempts
    draws_B: Array
    done_B: Array


def _search(
    sample: Sample, context: Any, keys_B: Array, how: Power, max_draws: int, at_once: int,
    live_B: Array, begun: Begun | None,
) -> _State:  # fmt: skip
    """Both stages, `at_once` draws per call of the sampler, until every row is done or has had its draws."""
    n, fraction = how
    B, K = jax.eval_shape(partial(outlines, sample), context, keys_B[None]).shape[1:3]
    zero_B = jnp.zeros(B, jnp.int32)
    start = _State(jnp.zeros((B, K), jnp.int32), zero_B, zero_B, zero_B, zero_B, zero_B, ~live_B)

    def unfinished(carry: tuple[Array, _State]) -> Array:
        return (carry[0] < max_draws) & ~carry[1].done_B.all()

    def call(carry: tuple[Array, _State]) -> tuple[Array, _State]:
        number_W = carry[0] + jnp.arange(at_once, dtype=jnp.int32)
        outline_WBK = outlines(sample, context, _each_key(keys_B, 2 * number_W))
        allowed_WB = (number_W < max_draws)[:, None] & ~carry[1].done_B
        goes_on = None if begun is None else partial(_agrees, begun)
        draw_WBK = spelt(sample, outline_WBK, allowed_WB, at_once, goes_on)
        counts_WB = jnp.ones_like(allowed_WB) if begun is None else _agrees(begun, draw_WBK)
        uniform_WB = jnp.zeros(allowed_WB.shape)
        if fraction:
            uniform_WB = jax.vmap(jax.vmap(jax.random.uniform))(_each_key(keys_B, 2 * number_W + 1))
        take = partial(_take_draw, n=n, fraction=fraction)
        state, _ = lax.scan(take, carry[1], (draw_WBK, uniform_WB, number_W < max_draws, counts_WB))
        return carry[0] + at_once, state

    return lax.while_loop(unfinished, call, (jnp.int32(0), start))[1]


def _take_draw(state: _State, drawn: tuple[Array, ...], *, n: int, fraction: float) -> tuple[_State, None]:
    """One draw for every row that is not done."""
    draw_BK, uniform_B, allowed, counts_B = drawn
    tried_B = ~state.done_B & allowed
    live_B = tried_B & counts_B
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
        draws_B=state.draws_B,
        done_B=done_B,
    )
    new = jax.tree.map(lambda new, old: jnp.where(_rows(live_B, new), new, old), new, state)
    return new._replace(draws_B=state.draws_B + tried_B), None


def _vote(
    sample: Sample, context: Any, keys_B: Array, n: int, candidates: int, at_once: int | None,
    live_B: Array, begun: Begun | None,
) -> Array:  # fmt: skip
    """Blocks [B, K] chosen among candidates that are spelt out, or by a plain sampler drawn, `at_once` at a time."""
    at_once = at_once or candidates
    W = min(max(TOGETHER // keys_B.shape[0], 1) if isinstance(sample, Outlined) else at_once, candidates)
    number_gW = jnp.arange(-(-candidates // W) * W).reshape(-1, W)
    drawn_gWBK = lax.map(lambda number_W: outlines(sample, context, _each_key(keys_B, number_W)), number_gW)
    outline_NBK = drawn_gWBK.reshape(-1, *drawn_gWBK.shape[2:])[:candidates]
    shared = jax.vmap(_shared, in_axes=1, out_axes=1)

    def goes_on(tokens_NBK: Array) -> Array:
        """A beginning that no other candidate has outweighs nothing, whatever follows."""
        on_NB = jnp.ones(tokens_NBK.shape[:2], bool) if n == 1 else shared(tokens_NBK) > 1
        return on_NB if begun is None else on_NB & _agrees(begun, tokens_NBK)

    tokens_NBK = spelt(sample, outline_NBK, jnp.broadcast_to(live_B, outline_NBK.shape[:2]), at_once, goes_on)
    lead_NB = jnp.zeros(tokens_NBK.shape[:2], jnp.int32) if begun is None else _lead(begun, tokens_NBK)
    known_B = 0 if begun is None else begun.known_B
    best_NB = lead_NB == lead_NB.max(axis=0)
    whole_B = lead_NB.max(axis=0) == known_B
    log_weight_NB, _ = jax.vmap(partial(vote_weights, n=n), in_axes=1, out_axes=(1, 0))(
        jnp.where(best_NB[..., None], tokens_NBK, -2 - jnp.arange(candidates)[:, None, None])  # others equal nothing
    )
    log_weight_NB = jnp.where(best_NB, jnp.where(whole_B, log_weight_NB, 0), -jnp.inf)
    choice_B = jax.vmap(jax.random.categorical)(_fold_in(keys_B, candidates), log_weight_NB.T)
    voted_BK = jnp.take_along_axis(tokens_NBK, choice_B[None, :, None], axis=0)[0]
    voted_BK = _completed(sample, outline_NBK, choice_B, voted_BK, live_B)
    if begun is not None:
        voted_BK = jnp.where(jnp.arange(voted_BK.shape[1]) < begun.known_B[:, None], begun.tokens_BK, voted_BK)
    return jnp.where(live_B[:, None], voted_BK, 0)


def _completed(sample: Sample, outline_NBK: Array, choice_B: Array, block_BK: Array, live_B: Array) -> Array:
    """The chosen blocks with what is unknown of them spelt out: a choice among candidates that share nothing."""
    need_B = live_B & (block_BK < 0).any(axis=-1)

    def complete(block_BK: Array) -> Array:
        chosen_BK = outline_NBK[choice_B, jnp.arange(len(choice_B))]
        whole_BK = spelt(sample, chosen_BK[None], need_B[None], len(choice_B))[0]
        return jnp.where(need_B[:, None], whole_BK, block_BK)

    return lax.cond(need_B.any(), complete, lambda block_BK: block_BK, block_BK)


def _agrees(begun: Begun, tokens_NBK: Array) -> Array:
    """Whether what is known of blocks is as they began, bool [N, B]."""
    given_BK = jnp.arange(tokens_NBK.shape[-1]) < begun.known_B[:, None]
    return ((tokens_NBK == begun.tokens_BK) | (tokens_NBK < 0) | ~given_BK).all(axis=-1)


def _lead(begun: Begun, tokens_NBK: Array) -> Array:
    """How many of the given tokens a block begins with, int [N, B]."""
    given_BK = jnp.arange(tokens_NBK.shape[-1]) < begun.known_B[:, None]
    return jnp.cumprod((tokens_NBK == begun.tokens_BK) & given_BK, axis=-1, dtype=jnp.int32).sum(axis=-1)


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
