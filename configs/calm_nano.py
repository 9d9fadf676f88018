"""CALM at two million parameters: a language model of chunks on the latents of configs/calm_autoencoder_nano.py.

    ncp-jax train configs/calm_autoencoder_nano.py
    ncp-jax train configs/calm_nano.py
    ncp-jax brierlm runs/calm_nano
    ncp-jax sample runs/calm_nano "The whale was there" --temperature 0.5

Variants: `:flow` and `:diffusion` are the other heads; `:k1` and `:k2` have shorter chunks, each on the autoencoder of
its name (`ncp-jax train configs/calm_autoencoder_nano.py:k2`).
"""

from configs.calm_autoencoder_nano import CHUNKS, adamw, autoencoder
from configs.calm_autoencoder_nano import config as autoencoder_run
from ncp_jax.checkpoint.config import CheckpointConfig
from ncp_jax.config import ConfigError
from ncp_jax.data.config import DataConfig, Source
from ncp_jax.models.calm.config import CalmConfig, DiffusionHead, EnergyHead, FlowHead
from ncp_jax.nn.llama_block import LlamaBackbone
from ncp_jax.train.run_config import EvaluationConfig, RunConfig, TrainConfig

BACKBONE = LlamaBackbone(width=128, heads=4, ffn=352)
LAYERS = 4
# Fewer target draws than the paper's 100: at this size they are two thirds of a step on CPU.
HEADS = {"energy": EnergyHead(blocks=2, draws=16), "flow": FlowHead(blocks=2), "diffusion": DiffusionHead(blocks=2)}


def config(variant: str = "energy") -> RunConfig:
    if variant not in HEADS | CHUNKS:
        raise ConfigError(f"calm_nano has no variant '{variant}'; known: {', '.join(HEADS | CHUNKS)}")
    size = variant if variant in CHUNKS else "k4"
    run = autoencoder_run(size).directory
    head = HEADS.get(variant, HEADS["energy"])
    model = CalmConfig(LAYERS, BACKBONE, autoencoder(CHUNKS[size]), autoencoder_run=run, head=head)
    return nano("calm_nano" if variant in ("energy", "k4") else f"calm_nano_{variant}", model)


def nano(name: str, model) -> RunConfig:
    """The recipe around CALM and its baseline."""
    return RunConfig(
        name=name,
        model=model,
        data=DataConfig(mixture=(Source("corpora/tiny"),), sequence=128, packing="documents"),
        optim=adamw(3e-3),
        train=TrainConfig(batch=16, steps=1200, log_every=20),
        evaluation=EvaluationConfig(every=100, batch=32),
        checkpoint=CheckpointConfig(every_steps=200, keep=8),
    )
