"""The family's Tasks in the trainer's step: learning, frozen parameters, meshes, first steps, who sees whom."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_calm_chunks import EOS, PAD, packed

from ncp_jax.models.calm import losses
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.chunks import chunks
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig, DiffusionHead, EnergyHead, FlowHead
from ncp_jax.models.calm.model import Calm
from ncp_jax.models.llama import LlamaConfig
from ncp_jax.nn.block import KV, one_array_per_layer
from ncp_jax.nn.llama_block import LlamaBackbone, view
from ncp_jax.optim.config import OptimConfig
from ncp_jax.optim.leaves import leaf_table
from ncp_jax.parallel.mesh import MeshConfig, make_mesh
from ncp_jax.parallel.rules import activation_rules, batch_sharding, place, shardings, unboxed
from ncp_jax.train.calm_families import autoencoder_task, calm_task, llama_task
from ncp_jax.train.step import TrainState, abstract_params, make_train_step
from ncp_jax.train.task import mean, objective

VOCAB, K, T = 19, 2, 16
BACKBONE = LlamaBackbone(16, 4, 24, kv_heads=2)
AE = AutoencoderConfig(VOCAB, K, 12, 20, 6, pad=PAD)
ENERGY = EnergyHead(2, 5, 4, 6)
HEADS = {"energy": ENERGY, "flow": FlowHead(2, 4, 3), "diffusion": DiffusionHead(2, 4, 5)}


def config(kind="energy", **changes) -> CalmConfig:
    return dataclasses.replace(CalmConfig(2, BACKBONE, AE, head=HEADS[kind]), **changes)


CONFIGS = {f"calm_{kind}": config(kind) for kind in HEADS} | {"calm_both": config(input="both")}


@functools.cache
def task_of(name):
    if name == "autoencoder":
        return autoencoder_task(AE, T)
    return llama_task(LlamaConfig(VOCAB, 2, BACKBONE), T) if name == "llama" else calm_task(CONFIGS[name], T)


NAMES = [*CONFIGS, "autoencoder", "llama"]


@functools.cache
def started(name):
    """(trainable, frozen) at their initial values."""
    return unboxed(jax.jit(task_of(name).init)(jax.random.key(0)))


def rows(seed=0, count=8):
    tokens = jax.random.randint(jax.random.key(seed), (count, T + 1), 0, VOCAB)
    real = jnp.ones((count, T), bool)
    sizes = jnp.full(count, T, jnp.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "real": real, "scored": real, "bytes": sizes}


@functools.cache
def gradient_of(name):
    """Jitted (params, frozen, batch) -> ((objective, sums), gradients of params and frozen)."""

    def total(params, frozen, batch):
        sums = task_of(name).loss(params, frozen, batch, jax.random.key(2))
        return objective(task_of(name), sums, task_of(name).weights(batch)), sums

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "calm_both"])
def test_a_task_trains_and_leaves_the_frozen_part_alone(name):
    task = task_of(name)
    (params, frozen), tx = started(name), optax.adam(3e-3)
    state = TrainState(jnp.int32(0), params, tx.init(params), jax.random.key_data(jax.random.key(1)))
    before = jax.tree.map(np.asarray, frozen)
    step, batch = jax.jit(make_train_step(task, tx)), rows()
    history = []
    for _ in range(40):
        state, metrics = step(state, frozen, batch)
        history.append(float(metrics["loss"]))
    assert not bool(metrics["bad"])
    assert np.mean(history[-5:]) < np.mean(history[:5])
    sums = jax.eval_shape(task.loss, params, frozen, batch, jax.random.key(0))
    assert set(task.weights(batch)) == set(sums)
    jax.tree.map(np.testing.assert_array_equal, frozen, before)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_a_rule_and_norms_and_biases_do_not_decay(name):
    task = task_of(name)
    leaves = leaf_table(unboxed(abstract_params(task)[0]), task.leaf_rules, OptimConfig(adam_weight_decay=0.1))
    for leaf in leaves:
        last = leaf.path.rpartition("/")[2]
        vector = "norm" in leaf.path or last == "bias" or last in ("b1", "b2", "b3", "b_down")
        assert (leaf.role in ("norm", "bias")) == vector, leaf.path
        assert not vector or leaf.weight_decay == 0, leaf.path


def test_the_autoencoder_gets_no_gradient():
    (_, sums), (_, grads) = gradient_of("calm_both")(*started("calm_both"), rows())
    assert sums["energy"] > 0
    assert all((grad == 0).all() for grad in jax.tree.leaves(grads))


def test_a_batch_without_pairs_has_loss_zero():
    batch = rows() | {"real": jnp.zeros((8, T), bool)}
    (value, sums), (grads, _) = gradient_of("calm_both")(*started("calm_both"), batch)
    assert value == 0
    assert mean(sums["energy"], task_of("calm_both").weights(batch)["energy"]) == 0
    assert all((grad == 0).all() for grad in jax.tree.leaves(grads))


def test_the_first_step_moves_the_last_layer_alone():
    """It starts at zero: all samples coincide, and nothing before it can matter yet."""
    (_, sums), (grads, _) = gradient_of("calm_energy")(*started("calm_energy"), rows())
    assert sums["diversity"] == 0
    last = grads["generator"].pop("out2")
    assert all(jnp.isfinite(grad).all() and (grad != 0).any() for grad in jax.tree.leaves(last))
    assert all((grad == 0).all() for grad in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", ["calm_energy", "autoencoder"])
def test_a_mesh_changes_nothing(name):
    """Eight devices, data x fsdp x tensor: the same losses and gradients, hence the same noise in every row."""
    boxed, batch = jax.eval_shape(task_of(name).init, jax.random.key(0)), rows()
    params, frozen = jax.tree.map(lambda a: a + 0.01 * jnp.cos(jnp.arange(a.size)).reshape(a.shape), started(name))
    alone = gradient_of(name)(params, frozen, batch)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = [jax.device_put(t, shardings(place(b, mesh))) for t, b in zip((params, frozen), boxed, strict=True)]
    spread = {n: jax.device_put(v, batch_sharding(mesh)) if v.ndim == 2 else v for n, v in batch.items()}
    with jax.set_mesh(mesh), nn.logical_axis_rules(activation_rules()):
        together = jax.jit(gradient_of(name).__wrapped__)(*placed, spread)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=2e-4), together, alone)


def test_packed_documents_give_what_they_give_alone():
    c = config()
    model, params = Calm(c), started("calm_energy")[0]
    documents = [[1, 2, 3, 4, 5], [6, 6, 8], [8, 8, 1, 8]]

    def states(batch):
        found = chunks(batch, K, PAD)
        return call(model, params, "hidden", found.tokens_BMk, None, found.segments_BM, found.positions_BM)[0]

    run = jax.jit(states)
    together, place = run(packed(documents, T, K)), 0
    for ids in documents:
        count = len(ids) // K + 1
        alone = run(packed([ids], T, K))
        np.testing.assert_allclose(together[place : place + count], alone[:count], atol=1e-5)
        place += count


def test_the_end_of_a_document_is_learnt():
    """The last chunk of a document, end-of-text token and pads included, is a target and never a source."""
    found = chunks(packed([[1, 2, 3, 4, 5, 6]], 8, 4), 4, PAD)
    np.testing.assert_array_equal(found.tokens_BMk[0, 1], [5, 6, EOS, PAD])
    assert losses.weights(config(), found)["energy"] == 1


@pytest.mark.parametrize("reads", ["discrete", "both"])
def test_no_state_sees_later_chunks(reads):
    c = config(input=reads)
    model, params = Calm(c), started("calm_energy" if reads == "discrete" else "calm_both")[0]
    tokens = rows(count=1)["tokens"].reshape(1, -1, K)
    latents = jax.random.normal(jax.random.key(1), (1, T // K, AE.latent))
    run = jax.jit(lambda t, z: call(model, params, "hidden", t, None if reads == "discrete" else z)[0])
    plain = run(tokens, latents)
    for m in range(T // K):
        changed = run(tokens.at[0, m].add(1), latents.at[0, m].add(1.0))
        np.testing.assert_array_equal(changed[:m], plain[:m])
        assert (changed[m:] != plain[m:]).any(axis=-1).all()


def test_cached_states_are_those_of_the_whole_row():
    c = config()
    model, params = Calm(c), started("calm_energy")[0]
    tokens, M, split = rows(count=2)["tokens"].reshape(2, -1, K), T // K, 5

    @jax.jit
    def run(params):
        whole = call(model, params, "hidden", tokens)
        see = view(c.backbone, jnp.arange(M)[None], None, jnp.float32)
        per_layer = one_array_per_layer(params)
        first, kv = call(model, per_layer, "decode", tokens[:, :split], _part(see, slice(0, split), split))
        rest, _ = call(model, per_layer, "decode", tokens[:, split:], _part(see, slice(split, M), M), kv)
        return whole, jnp.concatenate([first, rest], axis=1), kv

    whole, parts, kv = run(params)
    assert isinstance(kv[0], KV)
    np.testing.assert_allclose(parts, whole, atol=1e-5)


def _part(see, which, keys):
    return see._replace(mask_BTJ=see.mask_BTJ[:, which, :keys], rope=tuple(table[:, which] for table in see.rope))


def test_latents_are_asked_for():
    with pytest.raises(ValueError, match=r"model\.input is 'both': give the latents"):
        call(Calm(CONFIGS["calm_both"]), started("calm_both")[0], "hidden", jnp.zeros((1, 2, K), jnp.int32))


def test_the_autoencoder_learns_to_bring_chunks_back():
    """A handful of chunks: the statistics rise to certainty, and evaluation is free of masks and dropout."""
    c = dataclasses.replace(AE, width=32, ffn=48, latent=16, token_dropout=0.0)
    task, batch, tx = autoencoder_task(c, T), rows(count=2), optax.adam(1e-2)
    params = unboxed(jax.jit(task.init)(jax.random.key(0)))[0]
    state = TrainState(jnp.int32(0), params, tx.init(params), jax.random.key_data(jax.random.key(1)))
    step, diagnose = jax.jit(make_train_step(task, tx)), jax.jit(task.diagnose)
    assert diagnose(params, None, batch)["tokens/mean"] < 0.5
    for _ in range(200):
        state, _ = step(state, None, batch)
    found = diagnose(state.params, None, batch)
    assert found["tokens/mean"] == found["chunks/mean"] == 1
    assert found["tokens/sample"] > 0.9
    assert 0 < found["sigma/least"] < found["sigma/mean"] < found["sigma/greatest"]
    assert found["kl"] > 1
    sums, weights = jax.jit(task.held_out)(state.params, None, batch)
    trained = jax.jit(task.loss)(state.params, None, batch, jax.random.key(0))
    assert sums["reconstruction"] < trained["reconstruction"]
    assert sums.keys() == weights.keys()
    assert (sums["tokens/mean"], weights["tokens/mean"]) == (2 * T, 2 * T)
    assert sums["chunks/mean"] == weights["chunks/mean"] == weights["kl"] == 2 * T / K
