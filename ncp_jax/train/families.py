"""From a model config to its Task: one builder per family."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ncp_jax.models import flops
from ncp_jax.models.ncp import losses
from ncp_jax.models.ncp.config import NCPConfig
from ncp_jax.models.ncp.diagnostics import statistics
from ncp_jax.models.ncp.model import NCP
from ncp_jax.models.olmo3 import Olmo3, Olmo3Config
from ncp_jax.ops.cross_entropy import linear_cross_entropy
from ncp_jax.train.task import Batch, Task


def build_model(config: NCPConfig | Olmo3Config, dtype: Any = jnp.float32) -> NCP | Olmo3:
    """The Flax module of a model config, computing in `dtype`."""
    return NCP(config, dtype) if isinstance(config, NCPConfig) else Olmo3(config, dtype)


def build_task(config: NCPConfig | Olmo3Config, sequence: int, dtype: Any = jnp.float32) -> Task:
    """The Task of a model config for rows of `sequence` tokens, computing in `dtype`."""
    return _ncp(config, sequence, dtype) if isinstance(config, NCPConfig) else _olmo3(config, sequence, dtype)


def _ncp(c: NCPConfig, sequence: int, dtype: Any) -> Task:
    model = NCP(c, dtype)

    def hidden(params, batch: Batch, **options):
        segments, positions = batch.get("segments", batch["real"].astype(jnp.int32)), batch.get("positions")
        return model.apply({"params": params}, batch["tokens"], segments, positions, **options)

    def weights(batch: Batch):
        segments = batch.get("segments", batch["real"].astype(jnp.int32))
        return losses.weights(c, batch["scored"], segments)

    def loss(params, frozen, batch: Batch, rng: Array):
        return losses.sums(c, hidden(params, batch), params, batch["targets"], batch["scored"])

    def diagnose(params, frozen, batch: Batch):
        found, state = hidden(params, batch, mutable="intermediates")
        return statistics(c, found, params, state["intermediates"])

    return _language_model(
        model, c, sequence, name="ncp", chunk=c.chunk, coefficients=losses.coefficients(c, sequence),
        weights=weights, loss=loss, diagnose=diagnose,
    )  # fmt: skip


def _olmo3(c: Olmo3Config, sequence: int, dtype: Any) -> Task:
    model = Olmo3(c, dtype)

    def weights(batch: Batch):
        tokens = batch["scored"].sum()
        return {"ntp": tokens} | ({"z": tokens} if c.z_loss else {})

    def loss(params, frozen, batch: Batch, rng: Array):
        found: Any = model.apply({"params": params}, batch["tokens"], batch.get("segments"), batch.get("positions"))
        token = linear_cross_entropy(
            found.out_BTD, params["head"]["kernel"], batch["targets"], batch["scored"], c.head_chunk
        )
        return {"ntp": token.nll} | ({"z": token.z} if c.z_loss else {})

    coefficients = {"ntp": 1.0} | ({"z": c.z_loss} if c.z_loss else {})
    return _language_model(
        model, c, sequence, name="olmo3", chunk=1, coefficients=coefficients, weights=weights, loss=loss
    )


def _language_model(model, c, sequence: int, **parts) -> Task:
    """What both families share: initial values, logits, FLOPs."""

    def init(rng: Array):
        return model.init(rng, jnp.zeros((1, parts["chunk"]), jnp.int32))["params"], None

    def forward(params, frozen, tokens_BT: Array) -> Array:
        return model.apply({"params": params}, tokens_BT, method="logits")

    count = flops.training_flops_per_token(c, sequence, convention="visible")
    return Task(
        vocab=c.vocab, init=init, forward=forward,
        flops_per_token=count, flops_convention=flops.CONVENTIONS["visible"], **parts,
    )  # fmt: skip
