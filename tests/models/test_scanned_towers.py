"""Scanned towers and their twin, the unrolled ones: the same loss and the same gradient of every leaf."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_tests import BACKBONE, VOCAB, K, presets, random_params

from ncp_jax.config import ConfigError
from ncp_jax.models.ncp.config import NCPConfig
from ncp_jax.ops.route_call import tile_of
from ncp_jax.parallel.mesh import MeshConfig, make_mesh
from ncp_jax.parallel.rules import activation_rules, batch_sharding, place, shardings
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
    close(ours, grads, gradient)


def close(ours, theirs, tolerance: float):
    """Every leaf, relative to its largest value. Some are zero but for rounding, which the largest gradient bounds."""
    everything = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(theirs))

    def one(path, a, b):
        scale = float(jnp.abs(b).max()) + 1e-3 * everything
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(one, ours, theirs)


@pytest.mark.parametrize(("name", "packing"), [("released", "documents"), ("paper", "concat")])
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


@pytest.mark.parametrize(("name", "packing"), [("released", "documents"), ("paper", "concat")])
def test_kernels(name, packing):
    """Step by step on this platform; the encoder scans two super-blocks and a remainder."""
    check(deep(presets()[name], (5, 1, 2)), "interpreted", packing, wide=False)


@pytest.mark.parametrize(("name", "packing"), [("released", "concat"), ("paper", "documents")])
def test_float32(name, packing):
    check(deep(presets()[name], (3, 2, 2)), "scan", packing, wide=False)


# data, fsdp, tensor, seq: rows and heads split; tokens split, so that a device's first concept is its neighbour's last
@pytest.mark.parametrize(
    ("form", "mesh"), [("scan", (1, 2, 2, 1)), ("interpreted", (2, 1, 2, 1)), ("interpreted", (1, 2, 1, 2))]
)
def test_a_mesh_changes_nothing(form, mesh):
    c, batch = deep(presets()["released"], (3, 1, 1)), batch_of("documents", 8 * K)
    params = random_params(build_model(c))
    loss, grads = gradients(c, params, batch, jnp.float32)
    boxed = jax.eval_shape(build_model(c).init, jax.random.key(0), jnp.zeros((1, K), jnp.int32))["params"]
    devices = make_mesh(MeshConfig(*mesh), jax.devices()[:4])
    with jax.set_mesh(devices), nn.logical_axis_rules(activation_rules()):
        split = jax.device_put(batch, batch_sharding(devices))
        our_loss, ours = gradients(
            with_form(c, form), jax.device_put(params, shardings(place(boxed, devices))), split, jnp.float32
        )
    np.testing.assert_allclose(our_loss, loss, rtol=1e-5)
    close(ours, grads, 1e-4)


@pytest.mark.parametrize(
    ("tower", "platform", "chosen"),
    [("kernel", "tpu", "kernel"), ("kernel", None, "scan"), ("scan", "cpu", "scan"), ("unrolled", "tpu", "unrolled")],
)
def test_what_is_chosen_for_a_platform(tower, platform, chosen):
    assert with_form(presets()["released"], tower).on(platform).routing.tower == chosen


def test_kernels_that_the_platform_does_not_have():
    with pytest.raises(ConfigError, match=r"routing\.tower 'kernel' needs a TPU, and this runs on 'cpu'"):
        build_task(with_form(presets()["released"], "kernel"), TOKENS, platform="cpu")


def test_tiles_that_a_tpu_cannot_cut():
    with pytest.raises(ConfigError, match="24 tokens on a device do not divide into tiles of 64"):
        tile_of(24, 64, K, interpret=False)


def test_a_diagnosis_is_unrolled():
    """It looks at every layer's route weights, which only that form leaves."""
    c, tokens = with_form(presets()["released"], "scan"), jnp.zeros((1, 2 * K), jnp.int32)
    model = build_model(c)
    _, state = model.apply({"params": random_params(model)}, tokens, mutable="intermediates")
    assert "weights" in state["intermediates"]["decoder"]["irc_0"]
