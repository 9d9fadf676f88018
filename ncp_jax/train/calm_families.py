"""The CALM family's Tasks: autoencoder, language model, autoregressive baseline."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ncp_jax.checkpoint.store import CheckpointStore
from ncp_jax.config import ConfigError, differences, to_dict
from ncp_jax.models.calm import flops, losses, reconstruction
from ncp_jax.models.calm.autoencoder import Autoencoder
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.chunks import Chunks, chunks
from ncp_jax.models.calm.config import AutoencoderConfig, CalmConfig
from ncp_jax.models.calm.model import Calm
from ncp_jax.models.calm.noise import TARGET, row_keys
from ncp_jax.models.llama import Llama, LlamaConfig
from ncp_jax.nn.layers import head_split
from ncp_jax.ops.cross_entropy import linear_cross_entropy
from ncp_jax.optim.leaves import TRANSFORMER_RULES, LeafRule
from ncp_jax.train.run_config import InitFrom
from ncp_jax.train.rundir import read_json
from ncp_jax.train.start import choose_step, weights_of
from ncp_jax.train.task import Batch, Params, Sums, Task

# The official runs train everything with AdamW: optim.optimizer = adamw, and embeddings decay like matrices
# (optim.embedding_weight_decay = 0.1). With muon, hidden matrices get it; what touches ids, noise or latents does not.
CALM_RULES: tuple[LeafRule, ...] = (
    LeafRule(r"generator/(noise|time1|input|out2?)/kernel", "head_edge", "adamw"),
    LeafRule(r"(encoder|decoder)/latent/kernel", "latent_edge", "adamw"),
    LeafRule(r"generator/blocks/w(1|2|3|_down)", "head_matrix", "muon", ((-2,), (-1,))),
    LeafRule(r"generator/blocks/(b(1|2|3|_down)|norm_(scale|bias))", "bias", "adamw", decay="none"),
    LeafRule(r"(input|latent_input|generator|encoder|decoder)/.*kernel", "linear", "muon", ((-2,), (-1,))),
    *TRANSFORMER_RULES,
)
# Fields of an autoencoder's config that matter only while it trains.
TRAINING_ONLY = ("token_dropout", "latent_dropout", "mask", "kl_weight", "kl_floor", "score_pads", "head_chunk")
NAME = "model.autoencoder_run"
STATISTICS_KEY = 0  # noise of statistics and evaluation is the same at every step


def autoencoder_task(c: AutoencoderConfig, sequence: int, dtype: Any = jnp.float32) -> Task:
    """The Task of an autoencoder: rows of `sequence` tokens, computing in `dtype`."""
    model = Autoencoder(c, dtype)

    def found_in(batch: Batch) -> Chunks:
        return chunks(batch, c.chunk, c.pad)

    def init(rng: Array):
        return model.init(rng, jnp.zeros((1, 1, c.chunk), jnp.int32))["params"], None

    def loss(params, frozen, batch: Batch, rng: Array) -> Sums:
        found = found_in(batch)
        return reconstruction.sums(c, model, params, found, reconstruction.draw_noise(c, rng, found.shape))

    def diagnose(params, frozen, batch: Batch) -> dict[str, Array]:
        found = found_in(batch)
        return reconstruction.statistics(c, model, params, found, _normals(c, found.shape))

    def held_out(params, frozen, batch: Batch) -> tuple[Sums, Sums]:
        """Terms without masking and dropout, the posterior sampled; how well tokens and chunks come back.

        Least, greatest and collapsed of all rows are means over batches, by chunks.
        """
        found = found_in(batch)
        normals, counts = _normals(c, found.shape), reconstruction.counts(found)
        named = reconstruction.statistics(c, model, params, found, normals)
        of = {name: counts["tokens" if name.startswith("tokens/") else "chunks"] for name in named}
        sums = reconstruction.evaluation_sums(c, model, params, found, normals)
        return sums | {name: value * of[name] for name, value in named.items()}, reconstruction.weights(c, found) | of

    return Task(
        name="calm_autoencoder", chunk=c.chunk, vocab=c.vocab, coefficients=reconstruction.coefficients(c), init=init,
        weights=lambda batch: reconstruction.weights(c, found_in(batch)), loss=loss, diagnose=diagnose,
        held_out=held_out, parameters=flops.autoencoder_count(c),
        flops_per_token=flops.autoencoder_training_flops_per_token(c), flops_convention=flops.CONVENTION,
        leaf_rules=CALM_RULES, reads_ends=True,
    )  # fmt: skip


def calm_task(c: CalmConfig, sequence: int, dtype: Any = jnp.float32) -> Task:
    """The Task of a CALM language model. Frozen: the autoencoder's parameters (its initial values from `init`)."""
    model, autoencoder = Calm(c, dtype), Autoencoder(c.autoencoder, dtype)

    def found_in(batch: Batch) -> Chunks:
        return chunks(batch, c.chunk, c.autoencoder.pad)

    def init(rng: Array):
        tokens_BMk = jnp.zeros((1, 1, c.chunk), jnp.int32)
        latents_BMl = None if c.input == "discrete" else jnp.zeros((1, 1, c.autoencoder.latent))
        frozen = autoencoder.init(jax.random.fold_in(rng, 1), tokens_BMk)["params"]
        return model.init(rng, tokens_BMk, latents_BMl)["params"], frozen

    def loss(params, frozen, batch: Batch, rng: Array) -> Sums:
        found = found_in(batch)
        noise = losses.draw_noise(c, rng, found.shape)
        return losses.sums(c, model, autoencoder, params, frozen, found, noise)

    return Task(
        name="calm", chunk=c.chunk, vocab=c.vocab, coefficients=losses.coefficients(c), init=init,
        weights=lambda batch: losses.weights(c, found_in(batch)), loss=loss, source=AutoencoderRun(c), reads_ends=True,
        parameters=flops.parameter_count(c),
        flops_per_token=flops.training_flops_per_token(c, sequence), flops_convention=flops.CONVENTION,
        leaf_rules=CALM_RULES,
    )  # fmt: skip


class AutoencoderRun:
    """The run whose best checkpoint a language model's frozen parameters come from."""

    def __init__(self, config: CalmConfig):
        self.config = config

    def check(self) -> None:
        """Raise ConfigError where there is no such run, or it trained another autoencoder than the config describes."""
        c = self.config
        if c.autoencoder_run is None:
            raise ConfigError(
                "model.autoencoder_run is missing: a CALM language model learns to predict the latents of a trained "
                "autoencoder; train one ('ncp-jax train' with a config whose model is an AutoencoderConfig) and give "
                "its run directory"
            )
        stored = read_json(Path(c.autoencoder_run) / "config.json")
        if stored is None:
            raise ConfigError(
                f"model.autoencoder_run {c.autoencoder_run} has no config.json; is it a run directory made by "
                "'ncp-jax train'? Train an autoencoder first, or correct the path"
            )
        theirs, expected = stored["config"]["model"], to_dict(c.autoencoder)
        if theirs["kind"] != expected["kind"]:
            raise ConfigError(
                f"model.autoencoder_run {c.autoencoder_run} holds a '{theirs['kind']}', not an autoencoder; give the "
                "run directory of one"
            )
        changes = [f"model.autoencoder.{line}" for line in differences(_shape(expected), _shape(theirs))]
        if changes:
            raise ConfigError(
                f"model.autoencoder is not the one that {c.autoencoder_run} trained (ours -> theirs): "
                f"{'; '.join(changes)}; copy its model config"
            )
        self._choose()

    def load(self, like: Params, run: Path) -> Params:
        """What the autoencoder learnt. Raises as `check`, and ConfigError where its tokenizer is not that of `run`."""
        self.check()
        return weights_of(self._source(), like, run, NAME)[0]

    def _choose(self) -> None:
        source = self._source()
        choose_step(CheckpointStore(f"{source.run}/checkpoints"), source.step, source.run, NAME)

    def _source(self) -> InitFrom:
        assert self.config.autoencoder_run is not None
        return InitFrom(self.config.autoencoder_run, "best")


def _shape(values: dict) -> dict:
    """The part of an autoencoder's config that its parameters and latents depend on."""
    return {name: value for name, value in values.items() if name not in TRAINING_ONLY}


def llama_task(c: LlamaConfig, sequence: int, dtype: Any = jnp.float32) -> Task:
    """The Task of the autoregressive baseline."""
    model = Llama(c, dtype)

    def init(rng: Array):
        return model.init(rng, jnp.zeros((1, 1), jnp.int32))["params"], None

    def weights(batch: Batch) -> Sums:
        tokens = batch["scored"].sum()
        return {"ntp": tokens} | ({"z": tokens} if c.z_loss else {})

    def loss(params, frozen, batch: Batch, rng: Array) -> Sums:
        found = call(model, params, "__call__", batch["tokens"], batch.get("segments"), batch.get("positions"))
        token = linear_cross_entropy(
            found.out_BTD, params["head"]["kernel"], batch["targets"], batch["scored"], c.head_chunk,
            z_gradient=c.z_loss > 0, split=head_split(),
        )  # fmt: skip
        return {"ntp": token.nll} | ({"z": token.z} if c.z_loss else {})

    def forward(params, frozen, tokens_BT: Array) -> Array:
        return call(model, params, "logits", tokens_BT)

    return Task(
        name="llama", chunk=1, vocab=c.vocab, coefficients={"ntp": 1.0} | ({"z": c.z_loss} if c.z_loss else {}),
        init=init, weights=weights, loss=loss, forward=forward,
        parameters=flops.llama_parameter_count(c),
        flops_per_token=flops.llama_training_flops_per_token(c, sequence), flops_convention=flops.CONVENTION,
        leaf_rules=CALM_RULES,
    )  # fmt: skip


def _normals(c: AutoencoderConfig, shape: tuple[int, int]) -> Array:
    """Standard normals [B, M, l], one key per row."""
    keys_B = row_keys(jax.random.key(STATISTICS_KEY), shape[0], TARGET)
    return jax.vmap(lambda key: jax.random.normal(key, (shape[1], c.latent)))(keys_B)
