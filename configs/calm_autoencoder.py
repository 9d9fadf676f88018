"""The paper's autoencoder of chunks, 75 million parameters at K = 4: 30,000 steps of half a million tokens.

    ncp-jax data prepare PILE... --out corpora/pile --tokenizer llama3.json
    ncp-jax train configs/calm_autoencoder.py

Variants: `:k1`, `:k2`, `:k4` (the default), `:k8`, and the arms of the paper's Table 2 and Figures 6 and 7 by their
names in ncp_jax/models/calm/presets.py, such as `:kl_weight_0.01` or `:latent_64`.
"""

import dataclasses

from ncp_jax.data.config import DataConfig, Source
from ncp_jax.models.calm import presets
from ncp_jax.models.calm.config import AutoencoderConfig
from ncp_jax.optim.config import OptimConfig, ScheduleConfig
from ncp_jax.train.run_config import EvaluationConfig, RunConfig, TrainConfig

SIZES = {f"k{chunk}": chunk for chunk in presets.CHUNKS}


def config(variant: str = "k4") -> RunConfig:
    return RunConfig(
        name=run_name(variant),
        model=dataclasses.replace(model(variant), score_pads=True, head_chunk=8192),  # official: pads are labels too
        data=DataConfig(mixture=(Source("corpora/pile"),), sequence=2048, packing="documents"),
        optim=official(),
        train=TrainConfig(batch=256, steps=30_000),
        evaluation=EvaluationConfig(every=1000, rows=256),
    )


def model(variant: str) -> AutoencoderConfig:
    """The autoencoder of a chunk size, or of an arm (then K = 4)."""
    if variant in SIZES:
        return presets.autoencoder(SIZES[variant])
    return presets.calm("S", arm=variant).autoencoder


def run_name(variant: str) -> str:
    return f"calm_autoencoder_{variant}"


def official(warmup: int = 0) -> OptimConfig:
    """AdamW at a constant 3e-4; embeddings decay. The scripts name warm-up steps and a schedule that ignores them."""
    schedule = ScheduleConfig(kind="constant", warmup=warmup)
    return OptimConfig(optimizer="adamw", adam_learning_rate=3e-4, embedding_weight_decay=0.1, schedule=schedule)
