"""CALM-M: 371 million parameters on latents of four tokens, 524 B tokens of the Pile. A v5p-64, say.

    ncp-jax train configs/calm_autoencoder.py
    ncp-jax train configs/calm_m.py

Variants: `:k1`, `:k2`, `:k8` for other chunk sizes, each on the autoencoder of its name. The official run; not trained
by us.
"""

import dataclasses

from configs.calm_autoencoder import SIZES, official, run_name
from ncp_jax.config import ConfigError
from ncp_jax.data.config import DataConfig, Source
from ncp_jax.models.calm import presets
from ncp_jax.models.calm.config import CalmConfig
from ncp_jax.train.run_config import EvaluationConfig, RunConfig, TrainConfig

CONTEXT = 2048  # chunks per row, at every K


def config(variant: str = "k4") -> RunConfig:
    return sized("M", variant)


def sized(size: str, variant: str) -> RunConfig:
    """CALM of a published size and chunk."""
    if variant not in SIZES:
        raise ConfigError(f"CALM has no variant '{variant}' of its chunk size; known: {', '.join(SIZES)}")
    model = dataclasses.replace(presets.calm(size, SIZES[variant]), autoencoder_run=f"runs/{run_name(variant)}")
    name = f"calm_{size.lower()}" + ("" if variant == "k4" else f"_{variant}")
    return language_model(name, model, steps=250_000)


def language_model(name: str, model: CalmConfig, steps: int) -> RunConfig:
    """The official recipe: 2,097,152 tokens per step, documents one after another without end-of-text."""
    sequence = CONTEXT * model.chunk
    return RunConfig(
        name=name,
        model=model,
        data=DataConfig(mixture=(Source("corpora/pile"),), sequence=sequence, packing="official"),
        optim=official(warmup=2000),  # the paper's words; the scripts' schedule ignores it
        train=TrainConfig(batch=2_097_152 // sequence, steps=steps),
        evaluation=EvaluationConfig(every=2500, rows=256),
    )
