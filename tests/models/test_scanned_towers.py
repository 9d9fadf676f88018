"""Scanned towers and their twin, the unrolled ones: the same loss and the same gradient of every leaf."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_tests import BACKBONE, VOCAB, K, presets, random_params

from ncp_jax.models.ncp.config import NCPConfig
from ncp_jax.train.families import build_model, build_task

TOKENS = 6 * K


def with_form(c: NCPConfig, tower: str) -> NCPConfig:
    return dataclasses.replace(c, routing=dataclasses.replace(c.routing, tower=tower))


def deep(c: NCPConfig, layers=(5, 3, 3), **routing) -> NCPConfig:
    """Two super-blocks and a remainder; one and a remainder; the same."""
    names = ("encoder_layers", "concept_layers", "decoder_layers")
    return dataclasses.replace(
        c, routing=dataclasses.replace(c.routing, **routing), **dict(zip(names, layers, strict=True))
    )


def batch_of(packing: str, length: int = TOKENS) -> dict[str, np.ndarray]:
    """Two rows. `documents`: the first row holds three, of which one has no whole chunk, and padding."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, length + 1))
    real = np.ones((2, length), bool)
    real[1, -K:] = False
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "real": real, "scored": real}
    if packing == "documents":
        lengths = [2 * K - 1, 1, K - 1, 1, length - 4 * K, K]
        segments = np.stack([np.repeat([1, 0, 2, 0, 3, 0], lengths), np.repeat([1, 0], [length - K, K])])
        starts = np.stack([np.repeat([0, 0, 2 * K, 2 * K, 3 * K, 3 * K], lengths), np.zeros(length, int)])
        scored = segments > 0
        batch |= {"segments": segments, "positions": np.arange(length) - starts, "real": scored, "scored": scored}
    return batch


def gradients(c: NCPConfig, params, batch, dtype):
    task = build_task(c, batch["tokens"].shape[1], dtype)

    def loss(params):
        sums, weights = task.loss(params, None, batch, jax.random.key(0)), task.weights(batch)
        return sum(sums[term] / weights[term] for term in sums)

    return jax.jit(jax.value_and_grad(loss))(params)


def check(c: NCPConfig, form: str, packing: str, wide: bool, length: int = TOKENS):
    """`form` against unrolled, tolerances relative to the largest gradient of each leaf."""
    with jax.enable_x64(wide):
        dtype = jnp.result_type(float)
        params = random_params(build_model(c, dtype))
        batch = batch_of(packing, length)
        loss, grads = gradients(c, params, batch, dtype)
        our_loss, ours = gradients(with_form(c, form), params, batch, dtype)
    value, gradient = (1e-9, 1e-9) if wide else (1e-5, 1e-4)
    np.testing.assert_allclose(our_loss, loss, rtol=value)
    everything = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))

    def close(path, ours, theirs):
        # Some leaves are zero but for rounding, which the largest gradient's scale bounds.
        scale = float(jnp.abs(theirs).max()) + 1e-3 * everything
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=gradient * scale, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(close, ours, grads)


@pytest.mark.parametrize("packing", ["concat", "documents"])
@pytest.mark.parametrize("name", ["released", "paper"])
def test_presets(name, packing):
    check(deep(presets()[name]), "scan", packing, wide=True)


SWITCHES = [(False, True, True), (True, False, True), (True, True, False), (False, False, False)]
MODES = [("signed", "softmax", "none"), ("softmax", "none", "signed"), ("none", "signed", "softmax")]


@pytest.mark.parametrize("number", range(len(SWITCHES)))
def test_fewer_routes(number):
    crc, irc = SWITCHES[number], MODES[number % len(MODES)]
    names = ("concept_from_encoder", "decoder_from_encoder", "decoder_from_concept")
    towers = ("irc_encoder", "irc_concept", "irc_decoder")
    switches = dict(zip(names, crc, strict=True)) | dict(zip(towers, irc, strict=True))
    base = presets()[["released", "paper"][number % 2]]
    concept = dataclasses.replace(base.concept, reinject=number % 3 == 0, shift=number % 4 != 3)
    check(deep(dataclasses.replace(base, concept=concept), (3, 1, 2), **switches), "scan", "documents", wide=True)


@pytest.mark.parametrize(("window", "layers"), [(None, (4, 2, 3)), (5, (2, 1, 1))])
def test_periods(window, layers):
    """Every layer full: super-blocks of one layer; nothing to scan."""
    c = presets()["released"]
    c = dataclasses.replace(c, backbone=dataclasses.replace(BACKBONE, window=window))
    check(deep(c, layers), "scan", "concat", wide=True, length=5 * K + 2)
