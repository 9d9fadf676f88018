"""The next-token baselines of the CALM paper: Transformer-S, -M and -L on the same text and tokens per step.

    ncp-jax train configs/calm_transformer.py:m

Variants: `:s` (the default), `:m`, `:l`. Not trained by us.
"""

import dataclasses

from configs.calm_autoencoder import official
from ncp_jax.data.config import DataConfig, Source
from ncp_jax.models.calm import presets
from ncp_jax.train.run_config import EvaluationConfig, RunConfig, TrainConfig


def config(size: str = "s") -> RunConfig:
    return RunConfig(
        name=f"calm_transformer_{size}",
        model=dataclasses.replace(presets.transformer(size.upper()), head_chunk=8192),
        data=DataConfig(mixture=(Source("corpora/pile"),), sequence=2048, packing="official"),
        optim=official(warmup=2000),  # as in configs/calm_m.py
        train=TrainConfig(batch=1024, steps=250_000),
        evaluation=EvaluationConfig(every=2500, rows=1024),
    )
