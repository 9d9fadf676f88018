"""Rotary tables: plain, and YaRN on full-attention layers alone."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from ncp_jax.nn.backbone import Backbone, Yarn
from ncp_jax.nn.block import sight
from ncp_jax.ops.rope import inverse_frequencies, rope_table, rotate, yarn_frequencies

POSITIONS = jnp.arange(40)[None]
BACKBONE = Backbone(width=64, heads=2, ffn=64, window=8, full_every=4, yarn=Yarn(factor=8.0, original_length=32))


def test_rotation_turns_each_pair_by_its_angle():
    x = np.random.default_rng(0).normal(size=(1, 40, 1, 8)).astype(np.float32)
    turned = np.asarray(rotate(jnp.asarray(x), rope_table(POSITIONS, inverse_frequencies(8, 100.0), 1.0, jnp.float32)))
    for t in (0, 1, 17, 39):
        for i in range(4):
            angle = t * 100.0 ** (-2 * i / 8)
            pair = complex(x[0, t, 0, i], x[0, t, 0, i + 4]) * complex(math.cos(angle), math.sin(angle))
            assert turned[0, t, 0, i] == pytest.approx(pair.real, abs=1e-5)
            assert turned[0, t, 0, i + 4] == pytest.approx(pair.imag, abs=1e-5)


def test_yarn_touches_full_layers_only():
    see = sight(BACKBONE, POSITIONS, None, jnp.float32)
    plain = rope_table(POSITIONS, inverse_frequencies(32, BACKBONE.rope_theta), 1.0, jnp.float32)
    np.testing.assert_array_equal(see.window_rope, plain)
    assert np.abs(np.asarray(see.full_rope) - np.asarray(plain)).max() > 0.1
    assert [BACKBONE.is_full(layer) for layer in range(8)] == [False, False, False, True] * 2


@pytest.mark.parametrize(("factor", "stated", "expected"), [(8.0, None, 0.1 * math.log(8) + 1), (8.0, 1.0, 1.0)])
def test_a_stated_attention_factor_is_used_exactly(factor, stated, expected):
    yarn = Yarn(factor=factor, original_length=32, attention_factor=stated)
    cos, _ = sight(dataclasses.replace(BACKBONE, yarn=yarn), POSITIONS, None, jnp.float32).full_rope
    assert float(cos[0, 0, 0, 0]) == pytest.approx(expected, abs=1e-6)  # cos(0) times the factor


def test_yarn_keeps_fast_dimensions_and_stretches_slow_ones():
    plain, scaled = inverse_frequencies(128, 5e5), yarn_frequencies(128, 5e5, 8.0, 8192, 32.0, 1.0)
    turns = 8192 * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns > 40], plain[turns > 40])
    np.testing.assert_allclose(scaled[turns < 0.7], plain[turns < 0.7] / 8)
    assert (np.diff(scaled) < 0).all()
