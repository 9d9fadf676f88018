"""From a model config to its Task: one builder per family."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from ncp_jax.models import flops
from ncp_jax.models.calm.autoencoder import Autoencoder
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig
from ncp_jax.models.calm.model import Calm
from ncp_jax.models.llama import Llama, LlamaConfig
from ncp_jax.models.ncp import losses
from ncp_jax.models.ncp.config import NCPConfig
from ncp_jax.models.ncp.diagnostics import statistics
from ncp_jax.models.ncp.model import NCP
from ncp_jax.models.olmo3 import Olmo3, Olmo3Config
from ncp_jax.nn.backbone import Backbone
from ncp_jax.nn.layers import head_split
from ncp_jax.ops.cross_entropy import linear_cross_entropy
from ncp_jax.train.calm_families import autoencoder_task, calm_task, llama_task
from ncp_jax.train.run_config import ModelConfig
from ncp_jax.train.task import Batch, Task


def build_model(config: ModelConfig, dtype: Any = jnp.float32, platform: str | None = None) -> Any:
    """The Flax module of a model config, computing in `dtype`; `platform` as in build_task."""
    return _FAMILIES[type(config)][0](_on(platform, config), dtype)


def build_task(config: ModelConfig, sequence: int, dtype: Any = jnp.float32, platform: str | None = None) -> Task:
    """The Task of a model config for rows of `sequence` tokens, computing in `dtype`.

    `platform` (tpu, gpu, cpu) is where it will run, be it compiled there or not: kernels are chosen for it. None: for
    any, so without kernels. Raises ConfigError for a kernel that the platform does not have.
    """
    return _FAMILIES[type(config)][1](_on(platform, config), sequence, dtype)


def _on(platform: str | None, config: Any) -> Any:
    if isinstance(config, NCPConfig):
        return config.on(platform)
    backbone = getattr(config, "backbone", None)
    return dataclasses.replace(config, backbone=backbone.on(platform)) if isinstance(backbone, Backbone) else config


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
            found.out_BTD, params["head"]["kernel"], batch["targets"], batch["scored"], c.head_chunk,
            z_gradient=c.z_loss > 0, split=head_split(),
        )  # fmt: skip
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
        vocab=c.vocab, init=init, forward=forward, parameters=flops.parameter_count(c),
        flops_per_token=count, flops_convention=flops.CONVENTIONS["visible"], **parts,
    )  # fmt: skip


_FAMILIES: dict[type, tuple[Callable[..., Any], Callable[..., Task]]] = {
    NCPConfig: (NCP, _ncp),
    Olmo3Config: (Olmo3, _olmo3),
    AutoencoderConfig: (Autoencoder, autoencoder_task),
    CalmConfig: (Calm, calm_task),
    LlamaConfig: (Llama, llama_task),
}
