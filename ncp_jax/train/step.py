"""The train step: (state, frozen, batch) -> (state, metrics), pure, jitted once, with its state donated.

Shapes: B rows of the global batch, A micro-batches.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import Mesh

from ncp_jax.optim.build import state_shardings
from ncp_jax.optim.leaves import Leaf
from ncp_jax.optim.muon import path_name
from ncp_jax.parallel.mesh import replicated
from ncp_jax.parallel.rules import place, shardings, unboxed
from ncp_jax.train.task import Batch, Params, Sums, Task, mean, objective

Metrics = dict[str, Array]


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "opt_state", "key"], meta_fields=[])
@dataclass(frozen=True)
class TrainState:
    """All that a step changes.

    `key` is raw key data, never advanced: micro-batch a of the step from n to n + 1 gets
    fold_in(fold_in(key, n), a), so that no two share noise and a resumed run draws what it would have drawn.
    """

    step: Any  # int32 [], optimizer steps done
    params: Params
    opt_state: Any
    key: Any  # uint32 [2]


@dataclass(frozen=True)
class Guard:
    """What to do with a step whose gradient is not finite, or whose norm is above `ceiling`."""

    skip: bool = False
    ceiling: float | None = None


def abstract_params(task: Task) -> tuple[Params, Params]:
    """(trainable, frozen) as boxed ShapeDtypeStructs; nothing is allocated."""
    return jax.eval_shape(task.init, jax.random.key(0))


def placed(boxed: Params, mesh: Mesh) -> Params:
    """Plain ShapeDtypeStructs of boxed ones, with the shardings that their axis names give on `mesh`."""
    return _sharded(unboxed(boxed), shardings(place(boxed, mesh)))


def abstract_state(task: Task, tx: optax.GradientTransformation, mesh: Mesh) -> tuple[TrainState, Params]:
    """State and frozen parameters as ShapeDtypeStructs that carry their shardings."""
    boxed, boxed_frozen = abstract_params(task)
    params, whole = placed(boxed, mesh), replicated(mesh)
    param_shardings = jax.tree.map(lambda a: a.sharding, params)
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    state = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, jax.eval_shape(tx.init, params), key)
    state_sharding = TrainState(whole, param_shardings, state_shardings(tx, params, param_shardings, whole), whole)
    return _sharded(state, state_sharding), placed(boxed_frozen, mesh)


def init_state(task: Task, tx: optax.GradientTransformation, seed: int, like: tuple[TrainState, Params]):
    """Fresh (state, frozen), each array born on its own devices."""

    def create() -> tuple[TrainState, Params]:
        key = jax.random.key(seed)
        params, frozen = unboxed(task.init(jax.random.fold_in(key, 0)))
        train_key = jax.random.key_data(jax.random.fold_in(key, 1))
        return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), train_key), frozen

    return jax.jit(create, out_shardings=jax.tree.map(lambda a: a.sharding, like))()


def make_train_step(
    task: Task,
    tx: optax.GradientTransformation,
    micro_batches: int = 1,
    guard: Guard = Guard(),
    leaves: Sequence[Leaf] = (),
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The step function, not jitted. Its static argument `diagnose` adds the task's statistics and norms by role."""

    def train_step(state: TrainState, frozen: Params, batch: Batch, diagnose: bool = False):
        # 1. What every sum is divided by: the whole global batch, before any micro-batch.
        weights = task.weights(batch)
        # 2. Gradient of the objective, summed over micro-batches.
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        sums, grads = _gradients(task, state.params, frozen, batch, weights, key, micro_batches)
        # 3. One optimizer step.
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # 4. Metrics: means of all terms, and what the loop watches.
        norm = optax.global_norm(grads)
        metrics = {f"loss/{term}": mean(sums[term], weights[term]) for term in sums}
        metrics |= {"loss": objective(task, sums, weights), "gradient_norm": norm}
        if "ntp" in sums and "bytes" in batch:
            metrics["bits_per_byte"] = sums["ntp"] / (math.log(2) * jnp.maximum(batch["bytes"].sum(), 1))
        if "wishes" in batch:  # of the processes that fed the rows: train/loop.py
            metrics["wishes"] = batch["wishes"].max()
        if diagnose:
            metrics |= _diagnostics(task, state.params, frozen, batch, grads, leaves)
        # 5. A bad step is left out, if the guard says so.
        bad = ~jnp.isfinite(norm) | ~jnp.isfinite(metrics["loss"])
        if guard.ceiling is not None:
            bad |= norm > guard.ceiling
        metrics["bad"] = bad
        if guard.skip:
            before = (state.params, state.opt_state)
            params, opt_state = jax.tree.map(partial(_unless, bad), (params, opt_state), before)
        return TrainState(state.step + 1, params, opt_state, state.key), metrics

    return train_step


def make_eval_step(task: Task) -> Callable[[Params, Params, Batch], tuple[Sums, Sums, Array]]:
    """The evaluation function, not jitted: (sums, weights, text bytes) of one batch."""

    def as_in_training(params: Params, frozen: Params, batch: Batch) -> tuple[Sums, Sums]:
        return task.loss(params, frozen, batch, jax.random.key(0)), task.weights(batch)

    held_out = task.held_out or as_in_training

    def eval_step(params: Params, frozen: Params, batch: Batch) -> tuple[Sums, Sums, Array]:
        return *held_out(params, frozen, batch), batch["bytes"].sum()

    return eval_step


def _gradients(task: Task, params, frozen, batch, weights: Sums, key: Array, micro_batches: int) -> tuple[Sums, Params]:
    def loss(params, batch, key) -> tuple[Array, Sums]:
        sums = task.loss(params, frozen, batch, key)
        return objective(task, sums, weights), sums

    gradient = jax.grad(loss, has_aux=True)
    if micro_batches == 1:
        grads, sums = gradient(params, batch, jax.random.fold_in(key, 0))
        return sums, grads

    def split(rows_B: Array) -> Array:  # micro-batch a takes every A-th row, so each device keeps its own rows
        return rows_B.reshape(-1, micro_batches, *rows_B.shape[1:]).swapaxes(0, 1)

    def body(total, part):
        index, micro = part
        grads, sums = gradient(params, micro, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, total, (sums, grads)), None

    first = jax.eval_shape(lambda: gradient(params, jax.tree.map(lambda a: split(a)[0], batch), key))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (first[1], first[0]))
    return lax.scan(body, zeros, (jnp.arange(micro_batches), jax.tree.map(split, batch)))[0]


def _unless(bad: Array, new: Array, old: Array) -> Array:
    """`old` where the step is bad; counters go on, so that the schedule keeps to the number of steps."""
    return new if jnp.issubdtype(new.dtype, jnp.integer) else jnp.where(bad, old, new)


def _diagnostics(task: Task, params, frozen, batch, grads, leaves: Sequence[Leaf]) -> Metrics:
    found = task.diagnose(params, frozen, batch) if task.diagnose else {}
    roles = {leaf.path: leaf.role for leaf in leaves}
    for prefix, tree in (("gradient_norm", grads), ("parameter_norm", params)):
        squares: dict[str, Array] = {}
        for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
            role = f"{prefix}/{roles[path_name(path)]}"
            squares[role] = squares.get(role, jnp.zeros((), jnp.float32)) + jnp.vdot(value, value)
        found |= {role: jnp.sqrt(square) for role, square in squares.items()}
    return found


def _sharded(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, sharding)
