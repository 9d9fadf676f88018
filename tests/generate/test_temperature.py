"""Tempered blocks: exact laws by chi-square, costs of Theorem 2, bounded work."""

import json
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import load
from scipy import special, stats

from ncp_jax.config import ConfigError
from ncp_jax.generate.temperature import (
    Power,
    Tempering,
    draw_blocks,
    exact,
    expected_draws,
    power,
    vote,
    vote_weights,
    whole_power,
)

K = 3  # tokens per block: outcome x is spelled in base 2, so that outcomes share tokens
OUTCOMES = 2**K  # every law is filled up with zeros to one size, so that one program serves all
GOLDEN = load("calm_temperature")
META = {(entry["dist"], entry["T"]): entry for entry in json.loads(str(GOLDEN["meta_json"]))}
DISTS = ("u3", "skew4", "geom6", "peaked5")


def spelled(outcome):
    return (outcome[..., None] >> jnp.arange(K)) & 1


def outcome(tokens_BK):
    return np.asarray(tokens_BK) @ (1 << np.arange(K))


def filled(p):
    return jnp.zeros(OUTCOMES).at[: len(p)].set(jnp.asarray(p))


def box(p, keys_NB):
    """The black box: the context is the probabilities themselves, one draw per key."""
    cdf = jnp.cumsum(p)
    uniform_NB = jax.vmap(jax.vmap(jax.random.uniform))(keys_NB)
    return spelled(jnp.minimum(jnp.searchsorted(cdf, uniform_NB, side="right"), len(p) - 1))


@cache
def compiled(method, temperature, **settings):
    return jax.jit(partial({"exact": exact, "vote": vote}[method], box, temperature=temperature, **settings))


def keys(rows, seed=0):
    return jax.random.split(jax.random.key(seed), rows)


def check_law(tokens_BK, law, least=1e-4):
    """Chi-square over outcomes, those expected fewer than five times taken together."""
    seen = np.bincount(outcome(tokens_BK), minlength=len(law))
    assert seen[len(law) :].sum() == 0
    seen = seen[: len(law)]
    expected = np.asarray(law, np.float64) * seen.sum()
    rare = expected < 5
    if rare.any():
        rare[np.argsort(expected)[: max(rare.sum(), 2)]] = True
        expected, seen = (np.append(a[~rare], a[rare].sum()) for a in (expected, seen))
    if len(expected) > 1 and expected.min() > 0:
        assert stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > least


@pytest.mark.parametrize("dist", DISTS)
@pytest.mark.parametrize("temperature", [0.7, 0.5, 0.4, 1 / 3])
def test_algorithm_1_has_its_exact_law_and_cost(dist, temperature):
    p, rows = GOLDEN[f"P/{dist}"], 5_000
    found = compiled("exact", temperature, at_once=8)(filled(p), keys(rows, DISTS.index(dist)))
    assert np.asarray(found.exact_B).all()
    check_law(found.tokens_BK, GOLDEN[f"PT/{dist}/{temperature:.6f}"])
    entry = META[dist, temperature]
    for draws_B, expected in ((found.full_draws_B, entry["E_N"]), (found.draws_B, entry["E_N_earlystop"])):
        draws_B = np.asarray(draws_B, np.float64)
        assert abs(draws_B.mean() - expected) < 3.5 * draws_B.std() / np.sqrt(rows) + 1e-9


@pytest.mark.parametrize(
    ("temperature", "law", "rows"),
    [(1.0, [0.5, 0.3, 0.2], 50_000), (0.5, [0.6579, 0.2368, 0.1053], 50_000), (1 / 3, [0.7812, 0.1687, 0.05], 20_000)],
)
def test_many_draws_of_a_known_law(temperature, law, rows):
    """E4 of the failure cases."""
    tempered = np.array([0.5, 0.3, 0.2]) ** (1 / temperature)
    tempered /= tempered.sum()
    np.testing.assert_allclose(tempered, law, atol=6e-5)
    check_law(compiled("exact", temperature, at_once=8)(filled([0.5, 0.3, 0.2]), keys(rows, 9)).tokens_BK, tempered)


@pytest.mark.parametrize("name", [name for name in GOLDEN.files if name.startswith("A2/")])
def test_algorithm_2_has_its_finite_law(name):
    _, dist, candidates, n = name.split("/")
    candidates, n = int(candidates[1:]), int(n[1:])
    p = filled(GOLDEN[f"P/{dist}"])
    found = compiled("vote", 1 / n, candidates=candidates)(p, keys(10_000, 1))
    assert (np.asarray(found.draws_B) == candidates).all()
    check_law(found.tokens_BK, GOLDEN[name])
    drawn_NBK = box(p, jax.vmap(partial(jax.random.split, num=5_000))(keys(candidates, 2)))
    order_B = np.asarray(jax.jit(jax.vmap(lambda c: vote_weights(c, n)[1], in_axes=1))(drawn_NBK))
    share = np.bincount(order_B, minlength=n + 1) / len(order_B)
    recorded = GOLDEN[f"A2fb/{dist}/N{candidates}/n{n}"].clip(0, 1)
    assert (abs(share - recorded) < 3.5 * np.sqrt(recorded * (1 - recorded) / len(order_B)) + 1e-9).all()


def voted_law(p, candidates, n):
    """The law of a vote by enumeration of the counts that N draws can have."""
    first = np.indices((candidates + 1,) * (len(p) - 1)).reshape(len(p) - 1, -1).T
    first = first[first.sum(axis=1) <= candidates]
    count = np.concatenate([first, candidates - first.sum(axis=1, keepdims=True)], axis=1)
    weight = special.binom(count, np.minimum(n, count.max(axis=1, keepdims=True)))
    log_chance = special.gammaln(candidates + 1) + (count * np.log(p) - special.gammaln(count + 1)).sum(axis=1)
    return np.exp(log_chance) @ (weight / weight.sum(axis=1, keepdims=True))


def test_votes_approach_the_law_as_candidates_grow():
    """E4 of the failure cases: p = (.5, .3, .2) at N = 8, 64, 512; the bias falls nearly as 1/N."""
    p = np.array([0.5, 0.3, 0.2])
    for n in (2, 3):
        tempered, off = p**n / (p**n).sum(), []
        for candidates in (8, 64):
            law = voted_law(p, candidates, n)
            off.append(abs(law - tempered).sum() / 2)
            check_law(compiled("vote", 1 / n, candidates=candidates)(filled(p), keys(2_500, 3)).tokens_BK, law)
        assert off[0] > 0.02
        assert 5 < off[0] / off[1] < 10
    many = compiled("vote", 0.5, candidates=512)(filled(p), keys(300, 4))
    check_law(many.tokens_BK, p**2 / (p**2).sum())


def test_stated_bias_of_votes():
    p, law = GOLDEN["P/skew4"], GOLDEN["PT/skew4/0.500000"]
    found = [abs(voted_law(p, candidates, 2) - law).sum() / 2 for candidates in (4, 8, 16, 24)]
    assert found == pytest.approx([0.077, 0.050, 0.029, 0.020], abs=6e-4)


def test_theorem_2():
    for (dist, temperature), entry in META.items():
        found = expected_draws(GOLDEN[f"P/{dist}"], temperature)
        assert found == pytest.approx((entry["E_N"], entry["E_N_earlystop"]), rel=1e-9)
        assert power(temperature) == pytest.approx((entry["n"], entry["alpha"]), abs=1e-12)
    assert expected_draws(np.array([0.5, 0.5, 0.0]), 0.5).full == pytest.approx(4)  # what never occurs costs nothing
    with pytest.raises(ConfigError, match=r"got a sum of 0\.9"):
        expected_draws(np.array([0.5, 0.4]), 0.5)


def test_draws_per_call_change_nothing():
    p = filled(GOLDEN["P/skew4"])
    for method, temperature, settings in (("exact", 0.4, {}), ("vote", 0.5, {"candidates": 8})):
        found = [compiled(method, temperature, **settings, at_once=size)(p, keys(5_000)) for size in (3, 8)]
        jax.tree.map(np.testing.assert_array_equal, *found)


def test_rows_do_not_see_each_other():
    p = filled(GOLDEN["P/geom6"])
    whole, few = (compiled("exact", 0.4, at_once=8)(p, some) for some in (keys(5_000), keys(5_000)[10:20]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[10:20], b), whole, few)


def test_work_is_bounded():
    """A flat law over 8 blocks at T = 1/4 needs 4 * 8^3 draws; after 100 a vote stands in, and the row says so."""
    flat = jnp.full(8, 1 / 8)
    assert expected_draws(np.full(8, 1 / 8), 0.25).full == pytest.approx(2048)
    found = compiled("exact", 0.25, max_draws=100, candidates=32, at_once=16)(flat, keys(4000))
    done = np.asarray(found.exact_B)
    assert 0.02 < done.mean() < 0.3
    draws = np.asarray(found.draws_B)
    assert draws[done].max() <= 100
    assert (draws[~done] == 132).all()
    check_law(np.asarray(found.tokens_BK)[~done], np.full(8, 1 / 8))


def test_a_thousand_equal_blocks():
    """Half of all rows have no agreeing pair among 1,400 draws; every row has a block, and none took more work."""

    def flat(_, keys_NB):
        return jax.vmap(jax.vmap(lambda key: jax.random.randint(key, (K,), 0, 10)))(keys_NB)

    found = jax.jit(lambda keys_B: exact(flat, None, keys_B, 0.5, max_draws=1400, at_once=200, candidates=50))(
        keys(300)
    )
    share = np.asarray(found.exact_B).mean()
    assert abs(share - (1 - (1 - 1 / 1000) ** 700)) < 3.5 * 0.5 / np.sqrt(300)
    assert np.asarray(found.draws_B).max() <= 1450
    assert (np.asarray(found.tokens_BK) < 10).all()


def test_rows_have_contexts_of_their_own():
    """Two laws in one batch, and blocks that follow their row's context."""
    p_BX = jnp.asarray([[0.9, 0.1], [0.2, 0.8]]).repeat(5_000, axis=0)

    def rows(p_BX, keys_NB):
        uniform_NB = jax.vmap(jax.vmap(jax.random.uniform))(keys_NB)
        return spelled((uniform_NB > p_BX[:, 0]).astype(jnp.int32))

    for how in (Tempering(0.5), Tempering(0.5, "vote", candidates=64)):
        found = outcome(jax.jit(lambda keys_B, how=how: draw_blocks(rows, p_BX, keys_B, how))(keys(10_000)).tokens_BK)
        share = found.reshape(2, -1).mean(axis=1)
        assert share == pytest.approx([0.01 / 0.82, 0.64 / 0.68], abs=0.015)


def test_temperatures_and_their_names():
    assert power(1 / 3) == Power(3, 0.0)
    assert power(1 / (3 - 1e-16)) == Power(3, 0.0)
    assert power(0.3333).whole == 3
    assert power(0.3333).fraction == pytest.approx(3.0003e-4, rel=1e-3)
    assert [whole_power(t) for t in (1.0, 0.5, 1 / 3, 0.333333, 0.3333333, 0.25, 0.1, 0.005)] == [
        1,
        2,
        3,
        3,
        3,
        4,
        10,
        200,
    ]
    with pytest.raises(ConfigError, match=r"temperature 0.3333 is not 1/n .*nearest: 0.333333 \(1/3\); method 'exact'"):
        whole_power(0.3333)
    with pytest.raises(ConfigError, match=r"nearest: 0.5 \(1/2\)"):
        Tempering(0.6, method="vote")
    with pytest.raises(ConfigError, match=r"nearest: 1 \(1/1\)"):
        whole_power(0.8)
    for wrong, message in ((0.0, "smaller, the more draws"), (-1.0, "in"), (float("nan"), "in"), (1.5, "nearest: 1")):
        for method in ("exact", "vote"):
            with pytest.raises(ConfigError, match=message):
                Tempering(wrong, method=method)
    for name in ("candidates", "max_draws", "at_once"):
        with pytest.raises(ConfigError, match=f"{name} must be at least 1, got 0"):
            Tempering(0.5, **{name: 0})
