"""Schedules against tables worked out by hand from the formula in optim/schedules.py."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ncp_jax.config import ConfigError, from_dict, to_dict
from ncp_jax.optim.build import build
from ncp_jax.optim.config import OptimConfig, ScheduleConfig, report
from ncp_jax.optim.leaves import LeafRule, leaf_table
from ncp_jax.optim.schedules import learning_rates, multiple, plan

# Warm-up 4 of 12 steps. Cosine t = 1/8 .. 8/8: 0.1 + 0.45 (1 + cos(pi t)).
WARM = [0.25, 0.5, 0.75, 1.0]
COSINE = [0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1]
TABLES = {
    "constant": (ScheduleConfig(kind="constant", warmup=4), [*WARM, *[1.0] * 8]),
    "cosine": (ScheduleConfig(kind="cosine", warmup=4, final_fraction=0.1), [*WARM, *COSINE]),
    "wsd": (
        ScheduleConfig(kind="wsd", warmup=4, decay=5, final_fraction=0.0),
        [*WARM, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0],
    ),
    "wsd_s": (
        ScheduleConfig(kind="wsd_s", warmup=4, decay=2, final_fraction=0.2, milestones=(6,)),
        [*WARM, 0.6, 0.2, 1.0, 1.0, 1.0, 1.0, 0.6, 0.2],
    ),
    "wsd_s by fractions": (  # cycles of 6 steps, a third of each descends
        ScheduleConfig(kind="wsd_s", warmup=1 / 3, decay=1 / 3, final_fraction=0.2, milestones=(0.5,)),
        [*WARM, 0.6, 0.2, 1.0, 1.0, 1.0, 1.0, 0.6, 0.2],
    ),
    "cosine in tokens": (
        ScheduleConfig(kind="cosine", warmup=400, unit="tokens", final_fraction=0.1),
        [*WARM, *COSINE],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_hand_table(name):
    config, expected = TABLES[name]
    schedule = plan(config, total_steps=12, tokens_per_step=100)
    np.testing.assert_allclose([multiple(schedule, s) for s in range(12)], expected, atol=1e-6)
    traced = jax.jit(lambda s: multiple(schedule, s))
    np.testing.assert_allclose([traced(jnp.int32(s)) for s in range(12)], expected, atol=1e-6)
    assert multiple(schedule, 500) == multiple(schedule, 11)


def test_horizon_outlives_the_run():
    schedule = plan(ScheduleConfig(warmup=2, horizon=10, final_fraction=0.0), total_steps=6, tokens_per_step=1)
    assert multiple(schedule, 5) == pytest.approx((1 + math.cos(math.pi * 4 / 8)) / 2)
    assert multiple(schedule, 9) == 0.0


def test_a_step_beyond_float32_integers_is_exact():
    schedule = plan(ScheduleConfig(kind="wsd", warmup=0, decay=2, final_fraction=0.0), 2**25 + 2, 1)
    values = [float(jax.jit(lambda s: multiple(schedule, s))(jnp.int32(2**25 + i))) for i in (-1, 0, 1)]
    assert values == [1.0, 0.5, 0.0]


def test_rounding_is_told():
    schedule = plan(ScheduleConfig(warmup=1000, unit="tokens"), total_steps=50, tokens_per_step=96)
    assert schedule.warmup == 10
    assert "1000 tokens / 96 tokens per step = 10.42 steps, rounded to 10" in schedule.notes[0]
    assert plan(ScheduleConfig(warmup=0.05), 450, 1).warmup == 23  # 22.5: halves go up
    assert plan(ScheduleConfig(warmup=0.05), 400, 1).notes == ()


def test_report_recipe_and_nano():
    rates = learning_rates(report(), 1_366_138, 4_194_304, 1999)
    assert rates == {"learning_rate/adamw": pytest.approx(6e-5), "learning_rate/muon": pytest.approx(6e-5)}
    assert learning_rates(report(), 1_430_512, 1, 1_430_511)["learning_rate/muon"] == pytest.approx(6e-6)
    nano = OptimConfig(muon_learning_rate=0.03, adam_learning_rate=0.05)
    last = learning_rates(nano, 450, 1024, 449)
    assert last == {"learning_rate/adamw": pytest.approx(0.005), "learning_rate/muon": pytest.approx(0.003)}


@pytest.mark.parametrize("kind", ["constant", "cosine", "wsd", "wsd_s"])
def test_resumed_rates_are_the_straight_ones_for_both_groups(kind):
    """Rates read off the updates: zero gradients and decay 1 leave W <- W (1 - lr)."""
    config = OptimConfig(
        muon_learning_rate=0.3, adam_learning_rate=0.5, muon_weight_decay=1.0, adam_weight_decay=1.0,
        schedule=TABLES[kind][0],
    )  # fmt: skip
    params = {"matrix": jnp.ones((3, 4)), "table": jnp.ones((2,))}
    rules = (LeafRule("matrix", "mlp", "muon", ((-2,), (-1,))), LeafRule("table", "codebook", "adamw"))
    zeros = jax.tree.map(jnp.zeros_like, params)
    straight, resumed = (build(config, leaf_table(params, rules, config), params, 12, 1) for _ in range(2))

    def rates(tx, state, steps):
        update, seen, states = jax.jit(tx.update), [], [state]
        for _ in range(steps):
            updates, state = update(zeros, state, params)
            seen.append((float(-updates["matrix"][0, 0]), float(-updates["table"][0])))
            states.append(state)
        return seen, states

    seen, states = rates(straight, straight.init(params), 12)
    for step in (1, 4, 5, 11):
        saved = jax.tree.map(np.asarray, states[step])
        again, _ = rates(resumed, jax.tree.map(jnp.asarray, saved), 12 - step)
        assert seen[step:] == again
    np.testing.assert_allclose(seen, np.outer(TABLES[kind][1], [0.3, 0.5]), atol=1e-6)
    logged = [learning_rates(config, 12, 1, s) for s in range(12)]
    np.testing.assert_allclose(seen, [(x["learning_rate/muon"], x["learning_rate/adamw"]) for x in logged], atol=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "warm-up fills the run": ({"warmup": 12}, "use at most 11"),
    "descent too long": ({"kind": "wsd", "warmup": 4, "decay": 9}, "8 are free"),
    "milestone beyond": ({"kind": "wsd_s", "warmup": 1, "milestones": (6, 12)}, "12 steps"),
    "milestones elsewhere": ({"milestones": (3,)}, "wsd_s"),
    "no milestones": ({"kind": "wsd_s"}, "milestones"),
    "unordered": ({"kind": "wsd_s", "milestones": (6, 5)}, "must increase"),
    "mixed": ({"kind": "wsd_s", "milestones": (0.5, 7)}, "mix"),
    "float one": ({"warmup": 1.0}, "write 1"),
    "negative": ({"warmup": -1}, "negative"),
    "no descent": ({"kind": "wsd", "decay": 0}, "constant"),
    "fraction": ({"final_fraction": 1.5}, "between 0 and 1"),
    "horizon": ({"horizon": 0}, "horizon 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    fields, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        plan(ScheduleConfig(**fields), 12, 1)


def test_config_survives_json():
    config = OptimConfig(schedule=ScheduleConfig(kind="wsd_s", warmup=2000, milestones=(0.25, 0.5)))
    again = from_dict(OptimConfig, to_dict(config))
    assert again == config
    assert isinstance(again.schedule.warmup, int)
    with pytest.raises(ConfigError, match="momentum"):
        OptimConfig(momentum=1.0)
