"""Tiny runs for tests: a corpus of some ten kilobytes, and configs and a dummy Task that train on it in seconds."""

import itertools
import json
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ncp_jax.checkpoint.config import CheckpointConfig
from ncp_jax.checkpoint.leaves import flatten
from ncp_jax.checkpoint.store import CheckpointStore
from ncp_jax.config import override
from ncp_jax.data.config import DataConfig, Source
from ncp_jax.data.prepare import Options, prepare
from ncp_jax.models.ncp.config import Concept, NCPConfig
from ncp_jax.models.olmo3 import Olmo3Config
from ncp_jax.nn.backbone import Backbone
from ncp_jax.optim.config import OptimConfig, ScheduleConfig
from ncp_jax.train import loop
from ncp_jax.train.run_config import EvaluationConfig, RunConfig, TrainConfig
from ncp_jax.train.task import Task

WORDS = ["the", "whale", "swam", "past", "an", "old", "ship", "sang", "about", "rope,", "&", "naïve", "—", "1851", "☂"]
VOCAB = 280
BACKBONE = Backbone(width=32, heads=4, ffn=48, window=8, rope_theta=1e4)
MODELS = {
    "ncp": NCPConfig(
        vocab=VOCAB, encoder_layers=2, concept_layers=1, decoder_layers=1, backbone=BACKBONE,
        concept=Concept(segments=4, codes=8, window=4),
    ),
    "olmo3": Olmo3Config(vocab=VOCAB, layers=2, backbone=BACKBONE),
}  # fmt: skip


def write_text(path: Path, seed: int = 0, documents: int = 60) -> Path:
    """Documents of 20 to 120 words, as JSON lines."""
    random = np.random.default_rng(seed)
    texts = [" ".join(random.choice(WORDS, random.integers(20, 120))) for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts)))
    return path


def prepare_corpus(folder: Path, seed: int = 0, documents: int = 60, tokenizer: Path | None = None) -> Path:
    """A prepared corpus of VOCAB ids, with its own tokenizer or one that is given."""
    source, out = write_text(folder / "text.jsonl", seed, documents), folder / "corpus"
    made_by = {"train_bpe": VOCAB} if tokenizer is None else {"tokenizer": str(tokenizer)}
    prepare([str(source)], Options(out=str(out), val_fraction=0.2, **made_by))
    return out


def run_config(corpus: Path | str, workdir: Path | str, model: str = "ncp", *changes: str) -> RunConfig:
    """20 steps of 8 rows of 16 tokens, every step logged, a checkpoint every 5; `changes` as on the command line."""
    config = RunConfig(
        name=f"tiny_{model}",
        model=MODELS[model],
        data=DataConfig(mixture=(Source(str(corpus)),), sequence=16),
        optim=OptimConfig(muon_learning_rate=0.02, adam_learning_rate=0.01, schedule=ScheduleConfig(warmup=4)),
        train=TrainConfig(batch=8, steps=20, log_every=1),
        evaluation=EvaluationConfig(every=10, rows=16),
        checkpoint=CheckpointConfig(every_steps=5, keep=5),
        workdir=str(workdir),
    )
    return override(config, list(changes))


def records(workdir: Path | str, kind: str) -> list[dict]:
    """Lines of metrics.jsonl of one kind, as they stand."""
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def bigram(vocab: int = VOCAB, width: int = 8) -> Task:
    """A dummy Task that compiles in an instant: a trained table [V, D], read out by a frozen matrix [D, V].

    A batch may carry `poison` [B], added to the loss of each row.
    """

    def init(rng):
        def normal(key, shape, axes):
            return nn.LogicallyPartitioned(jax.random.normal(key, shape), axes)

        keys = jax.random.split(rng)
        trained = {"embed": {"table": normal(keys[0], (vocab, width), ("vocab", "embed"))}}
        return trained, {"readout": normal(keys[1], (width, vocab), ("embed", "vocab"))}

    def loss(trained, frozen, batch, rng):
        logits = trained["embed"]["table"][batch["tokens"]] @ frozen["readout"]
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
        poison = (batch["poison"][:, None] * trained["embed"]["table"][0, 0]).sum() if "poison" in batch else 0
        return {"ntp": jnp.where(batch["scored"], nll, 0).sum() + poison}

    return Task(
        name="bigram", chunk=1, vocab=vocab, coefficients={"ntp": 1.0}, init=init,
        weights=lambda batch: {"ntp": batch["scored"].sum()}, loss=loss,
    )  # fmt: skip


def watch_batches(patch: Callable[[Any, str, Any], None], seen: Callable[[int, dict], dict | None]) -> None:
    """Call `seen(number, batch)` for each training batch on its way to the devices; what it returns goes on instead.

    `patch` is monkeypatch.setattr or setattr; numbers count from 1 in this process.
    """
    counter, original = itertools.count(1), loop.with_bytes

    def with_bytes(batch, token_bytes):
        batch = original(batch, token_bytes)
        return seen(next(counter), batch) or batch

    patch(loop, "with_bytes", with_bytes)


def use_devices(patch: Callable[[Any, str, Any], None], count: int) -> None:
    """Let runs use the first `count` devices: eight simulated ones on two cores are slow."""
    original = loop.make_mesh
    patch(loop, "make_mesh", lambda config, devices=None: original(config, devices or jax.devices()[:count]))


def config_file(folder: Path, corpus: Path | str, model: str) -> Path:
    """A file for `ncp-jax train` that returns run_config."""
    file = folder / f"tiny_{model}.py"
    call = f"run_config({str(corpus)!r}, None, {model!r})"
    file.write_text(f"from tiny_runs import run_config\n\n\ndef config():\n    return {call}\n")
    return file


def child_environment(**changes: str) -> dict[str, str]:
    """Environment of a Python process that imports what this one can."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | changes


def digest(batch: dict[str, np.ndarray]) -> int:
    """Checksum of a batch."""
    return zlib.crc32(b"".join(batch[name].tobytes() for name in sorted(batch)))


def final_state(workdir: Path | str, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by name."""
    store = CheckpointStore(f"{workdir}/checkpoints")
    return {name: np.asarray(value) for name, value in flatten(store.restore(step, store.abstract(step))).items()}


def assert_bit_equal(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
    assert not different
