"""The autoencoder of the nano CALM models: chunks of four tokens as 128 numbers, and back.

    ncp-jax data prepare launch/tiny_corpus/tiny_corpus.jsonl --out corpora/tiny --train-bpe 4096 \
        --split-file launch/tiny_corpus/split.json
    ncp-jax train configs/calm_autoencoder_nano.py

A language model of chunks (configs/calm_nano.py) is trained on its latents. Variants: `:k1`, `:k2` for shorter chunks.
Expect 99.8 % of held-out tokens to come back.
"""

from ncp_jax.config import ConfigError
from ncp_jax.data.config import DataConfig, Source
from ncp_jax.models.calm.config import AutoencoderConfig
from ncp_jax.optim.config import OptimConfig, ScheduleConfig
from ncp_jax.train.run_config import EvaluationConfig, RunConfig, TrainConfig

PAD, MASK = 4096, 4097  # beyond the tokenizer's ids; its id 0 ends a text, so it cannot stand for a dropped token


CHUNKS = {"k1": 1, "k2": 2, "k4": 4}


def config(variant: str = "k4") -> RunConfig:
    if variant not in CHUNKS:
        raise ConfigError(f"calm_autoencoder_nano has no variant '{variant}'; known: {', '.join(CHUNKS)}")
    return RunConfig(
        name="calm_autoencoder_nano" + ("" if variant == "k4" else f"_{variant}"),
        model=autoencoder(CHUNKS[variant]),
        data=DataConfig(mixture=(Source("corpora/tiny"),), sequence=128, packing="documents"),
        optim=adamw(3e-3),
        train=TrainConfig(batch=16, steps=3000, diagnose_every=500, log_every=50),
        evaluation=EvaluationConfig(every=250, batch=32),
    )


def autoencoder(chunk: int) -> AutoencoderConfig:
    """The paper's shape with a quarter of its width; the same latent size, 32 numbers per token."""
    return AutoencoderConfig(vocab=4098, chunk=chunk, width=128, ffn=320, latent=32 * chunk, pad=PAD, mask=MASK)


def adamw(rate: float) -> OptimConfig:
    """The official optimizer (embeddings decay too) with a cosine instead of its constant rate: runs are short."""
    schedule = ScheduleConfig(kind="cosine", warmup=0.05, final_fraction=0.05)
    return OptimConfig(optimizer="adamw", adam_learning_rate=rate, embedding_weight_decay=0.1, schedule=schedule)
