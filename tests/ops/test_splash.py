"""The splash kernel and its twin: the same outputs and gradients, alone, over a mesh, and in a whole model."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models_for_tests import random_params

from ncp_jax.config import ConfigError
from ncp_jax.models.ncp.config import Concept, NCPConfig
from ncp_jax.nn.backbone import Backbone
from ncp_jax.nn.block import Blocks, sight
from ncp_jax.nn.stack import plain_stack
from ncp_jax.ops import splash
from ncp_jax.ops.attention import attend, visible
from ncp_jax.ops.splash import splash_attend
from ncp_jax.parallel.mesh import MeshConfig, make_mesh
from ncp_jax.train.families import build_model, build_task

B, T, H, K, h = 2, 256, 4, 2, 8
SEGMENTS = np.repeat([[1, 0, 2, 3, 0], [1, 2, 0, 3, 4]], [50, 14, 92, 80, 20], axis=1)
LOCAL = {"interpret": True, "split": P(("data", "fsdp"), "seq", "tensor")}


class Case(NamedTuple):
    """A form of attention; `fused` says which backward kernels must agree."""

    window: int | None
    packed: bool = False
    fused: bool = False
    length: int = T


CASES = {
    "full, fused backward": Case(None, fused=True),
    "packed": Case(None, packed=True),
    "windowed, packed, fused backward": Case(30, packed=True, fused=True),
    "window beyond a block, rows of no whole tile": Case(130, length=200),
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", splash.TILE)  # several blocks even in short rows


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_the_references(name, monkeypatch):
    """Padded queries too: both give 0 there."""
    case = CASES[name]
    monkeypatch.setattr(splash, "FUSED", 2 if case.fused else 1)
    check(case, functools.partial(splash_attend, **LOCAL))


# data, fsdp, tensor, seq: rows and queries split; more devices than key-value heads; queries split to part of a tile
@pytest.mark.parametrize(
    ("mesh", "case"), [((1, 2, 1, 2), CASES["packed"]), ((1, 1, 4, 1), Case(30)), ((2, 1, 1, 4), Case(30, packed=True))]
)
def test_a_mesh_changes_nothing(mesh, case):
    with jax.set_mesh(make_mesh(MeshConfig(*mesh), jax.devices()[: int(np.prod(mesh))])):
        out = check(case, functools.partial(splash_attend, **LOCAL))
    shard = out.sharding.shard_shape(out.shape)
    assert shard[0] == B // (mesh[0] * mesh[1])
    assert shard[2] == H // mesh[2]


def check(case: Case, ours) -> jax.Array:
    """Compare with the reference; returns our outputs."""
    segments = jnp.asarray(SEGMENTS, jnp.int32) if case.packed else None
    q, k, v, weight = (jax.random.normal(jax.random.key(i), (B, case.length, n, h)) for i, n in enumerate((H, K, K, H)))

    def reference(q, k, v, window, segments):
        place = jnp.arange(q.shape[1])[None]  # all that the kernel knows of positions
        return attend(q, k, v, visible(place, place, window, segments, segments))

    def run(attention):
        def loss(q, k, v):
            out = attention(q, k, v, case.window, segments)
            return (out * weight).sum(), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    (ours_grads, ours_out), (grads, out) = run(ours), run(reference)
    np.testing.assert_allclose(ours_out, out, atol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), ours_grads, grads)
    if case.packed:
        assert (np.asarray(ours_out)[SEGMENTS == 0] == 0).all()
    return ours_out


@pytest.mark.parametrize("window", [4, None])
def test_a_window_counts_the_query_itself(window):
    """Queries that a change of key 100 reaches: none before it, and W of them from it on."""
    q, k, v = (jax.random.normal(jax.random.key(i), (1, T, 1, h)) for i in range(3))
    run = jax.jit(lambda v: splash_attend(q, k, v, window, interpret=True))
    change = np.abs(run(v.at[:, 100].add(1.0)) - run(v)).max(axis=(0, 2, 3))
    assert list(np.flatnonzero(change)) == list(range(100, T if window is None else 104))


LENGTH, CHUNK = 512, 4
MODEL = NCPConfig(
    vocab=40, encoder_layers=2, concept_layers=1, decoder_layers=1,
    backbone=Backbone(width=16, heads=2, ffn=24, window=70, full_every=2, rope_theta=1e4),
    concept=Concept(chunk=CHUNK, segments=4, codes=6, window=20),
)  # fmt: skip


def with_attention(attention: str, **changes) -> NCPConfig:
    return dataclasses.replace(MODEL, backbone=dataclasses.replace(MODEL.backbone, attention=attention, **changes))


def test_a_whole_model_on_packed_rows():
    """Loss and gradients through tokens and concepts; the last tokens of two documents are no whole chunk."""
    lengths = [150, 2, 200, 100, 60]
    segments = np.repeat([1, 0, 2, 3, 0], lengths)[None]
    starts = np.repeat([0, 0, 152, 352, 352], lengths)[None]
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab, (1, LENGTH + 1))
    batch = {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "real": segments > 0, "scored": segments > 0,
        "segments": segments, "positions": np.arange(LENGTH)[None] - starts,
    }  # fmt: skip
    params = random_params(build_model(MODEL))
    found = {}
    for attention in ("reference", "interpreted"):
        task = build_task(with_attention(attention), LENGTH)

        def loss(params, task=task):
            sums, weights = task.loss(params, None, batch, jax.random.key(0)), task.weights(batch)
            return sum(sums[term] / weights[term] for term in sums)

        found[attention] = jax.jit(jax.value_and_grad(loss))(params)
    (loss, grads), (ours, our_grads) = found["reference"], found["interpreted"]
    np.testing.assert_allclose(ours, loss, rtol=1e-5)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4 * scale), our_grads, grads)


@pytest.mark.parametrize(("remat", "calls"), [("none", 2), ("block", 3), ("dots", 2)])
def test_remat_runs_the_kernel_forward_as_often_as_it_must(remat, calls):
    """Once forward and once back; `block` keeps a layer's input alone, so forward again; `dots` keeps its output."""
    s = with_attention("splash", remat=remat).backbone
    x = jax.ShapeDtypeStruct((1, T, s.width), jnp.float32)
    weights = jax.eval_shape(lambda: _blocks(s, 1))

    def loss(x, weights):
        return plain_stack(x, weights, s, sight(s, jnp.arange(T)[None], None, x.dtype)).sum()

    lowered = jax.jit(jax.value_and_grad(loss)).trace(x, weights).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("call @_splash_attention") == calls


def _blocks(s: Backbone, layers: int):
    return Blocks(s, layers, layers).init_with_output(jax.random.key(0))[0]


def test_auto_is_the_kernel_on_a_tpu_alone():
    """Lowered for a TPU on a machine without one: kernels, and no array as large as a mask. On short rows neither."""

    def text(platform: str, length: int) -> str:
        model, tokens = build_model(MODEL, platform=platform), jax.ShapeDtypeStruct((1, length), jnp.int32)
        shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, CHUNK), jnp.int32))
        traced = jax.jit(lambda params, tokens: model.apply(params, tokens).out_BTD).trace(shapes, tokens)
        return traced.lower(lowering_platforms=(platform,)).as_text()

    on_tpu, on_cpu = text("tpu", LENGTH), text("cpu", LENGTH)
    assert on_tpu.count("call @_splash_attention") == MODEL.layers
    assert f"{LENGTH}x{LENGTH}x" not in on_tpu
    assert "splash" not in on_cpu
    assert f"{LENGTH}x{LENGTH}x" in on_cpu
    assert "splash" not in text("tpu", splash.TILE - CHUNK)


@pytest.mark.parametrize(
    ("attention", "platform", "chosen"),
    [
        ("auto", "tpu", "splash"), ("auto", "cpu", "reference"), ("auto", "gpu", "reference"),
        ("auto", None, "reference"), ("splash", "tpu", "splash"), ("splash", None, "reference"),
        ("reference", "tpu", "reference"), ("interpreted", "cpu", "interpreted"),
    ],
)  # fmt: skip
def test_what_is_chosen_for_a_platform(attention, platform, chosen):
    assert with_attention(attention).backbone.on(platform).attention == chosen


def test_a_kernel_that_the_platform_does_not_have():
    with pytest.raises(ConfigError, match=r"backbone\.attention 'splash' is a TPU kernel, and this runs on 'cpu'"):
        build_task(with_attention("splash"), LENGTH, platform="cpu")
