"""BrierLM of trained runs: one text, cut once, scored by every run at the same places.

Shapes: B rows, T tokens per row, M chunks, k tokens per chunk, R samples, p contexts; `...` rows or contexts, and
positions.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from ncp_jax.config import ConfigError, frozen
from ncp_jax.data.documents import documents, find_sources
from ncp_jax.data.store import TokenStore
from ncp_jax.evaluate.blocks import BlockSampler, score_blocks
from ncp_jax.evaluate.brier import Scores
from ncp_jax.evaluate.brier_rows import Packing, Rows, cut
from ncp_jax.evaluate.next_token import Starts, of_task, score_next_token
from ncp_jax.models.calm.autoencoder import Autoencoder
from ncp_jax.models.calm.call import call
from ncp_jax.models.calm.config import CalmConfig
from ncp_jax.models.calm.model import Calm
from ncp_jax.models.calm.reconstruction import tokens_of
from ncp_jax.models.calm.sampling import keyed_latents
from ncp_jax.train.loaded import LoadedRun

Documents = list[list[int]]


@frozen
class ScoringOptions:
    """What is scored, and how. None: as the first run was trained."""

    block: int | None = None  # tokens per row
    packing: Packing | None = None
    starts: Starts | None = None  # None: blocks if any run samples blocks
    samples: int = 8  # per block, of a block sampler
    estimator: Literal["all", "official"] = "all"
    seed: int = 0
    rows: int | None = None  # the first so many; None: all
    batch: int = 4
    at_once: int = 16


def score_runs(runs: Sequence[LoadedRun], texts: Documents, options: ScoringOptions) -> list[Scores]:
    """Scores of every run, in their order. Raises ConfigError for runs that cannot be scored on the same places."""
    rows, chunk = rows_for(runs, texts, options), common_chunk(runs)
    starts: Starts = options.starts or ("tokens" if chunk is None else "blocks")
    if starts == "tokens" and chunk is not None:
        raise ConfigError("a block sampler is scored where its blocks start; leave --starts out, or use 'blocks'")
    return [_score(run, rows, starts, chunk, options) for run in runs]


def held_out_documents(run: LoadedRun) -> Documents:
    """Token ids of the held-out documents that a run's own evaluation reads, without end-of-text."""
    found: Documents = []
    for source in run.config.data.mixture:
        store = TokenStore.open(f"{source.path.rstrip('/')}/{run.config.evaluation.split}")
        ids = store.read(0, store.manifest.tokens)
        found += [ids[a : b - 1].tolist() for a, b in itertools.pairwise(store.offsets)]
    return found


def file_documents(run: LoadedRun, paths: list[str], text_key: str = "text") -> Documents:
    """Token ids of the documents of .txt and .jsonl files, by the run's tokenizer, without end-of-text."""
    texts = [text.text for file in find_sources(paths).values() for text in documents(file, text_key=text_key)]
    return run.tokenizer.encode_batch([text for text in texts if text])


def rows_for(runs: Sequence[LoadedRun], texts: Documents, options: ScoringOptions) -> Rows:
    """The text as rows. End-of-text is part of it unless the first run was trained on a stream without."""
    first = runs[0]
    for run in runs[1:]:
        if run.tokenizer.hash != first.tokenizer.hash:
            raise ConfigError(
                f"{first.config.name} and {run.config.name} have different tokenizers; score them one by one"
            )
    data = first.config.data
    if data.packing != "official":
        texts = [[*ids, first.tokenizer.eos] for ids in texts]
    packing: Packing = "documents" if data.packing == "documents" else "official"
    rows = cut(texts, options.block or data.sequence, options.packing or packing)
    if options.rows is None:
        return rows
    return rows._replace(**{name: getattr(rows, name)[: options.rows] for name in rows._fields if name != "packing"})


def common_chunk(runs: Sequence[LoadedRun]) -> int | None:
    """The chunk of those runs that sample blocks; None if none does."""
    chunks = {run.config.model.chunk for run in runs if isinstance(run.config.model, CalmConfig)}
    if len(chunks) > 1:
        raise ConfigError(f"runs with chunks of {sorted(chunks)} tokens are scored at different places; one at a time")
    return next(iter(chunks), None)


def block_sampler(run: LoadedRun) -> BlockSampler:
    """A CALM run as a sampler of blocks at temperature 1.

    `after` uses its keys as they are, `everywhere` folds the block's place in: fold_in(key, 0) draws the second block.
    """
    c = run.config.model
    assert isinstance(c, CalmConfig)
    model, autoencoder = Calm(c), Autoencoder(c.autoencoder)

    def states(params: Any, frozen: Any, tokens_BT: Array) -> Array:
        tokens_BMk = tokens_BT.reshape(len(tokens_BT), -1, c.chunk)
        latents = None
        if c.input != "discrete":  # assumption: the posterior's mean; training reads a sample of it
            latents = call(autoencoder, frozen, "encode", tokens_BMk).mean
        return call(model, params, "hidden", tokens_BMk, latents)

    def drawn(params: Any, frozen: Any, h_BMD: Array, keys_RBM: Array) -> Array:
        condition = call(model, params, "condition", h_BMD)

        def one(keys_BM: Array) -> Array:
            z_BMl = keyed_latents(c, model, params, condition, keys_BM[None])[0]
            return tokens_of(c.autoencoder, autoencoder, frozen, z_BMl)

        return lax.map(one, keys_RBM)

    @jax.jit
    def everywhere(params, frozen, tokens_BT: Array, keys_RB: Array) -> Array:
        h_BMD = states(params, frozen, tokens_BT)[:, :-1]
        at_place = jax.vmap(jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None)), (0, None))
        return drawn(params, frozen, h_BMD, at_place(keys_RB, jnp.arange(h_BMD.shape[1])))

    @jax.jit
    def after(params, frozen, context: tuple[Array, Array], keys_Rp: Array) -> Array:
        tokens_pT, length_p = context
        h_pMD = states(params, frozen, tokens_pT)
        last_p1D = jnp.take_along_axis(h_pMD, (length_p // c.chunk - 1)[:, None, None], axis=1)
        return drawn(params, frozen, last_p1D, keys_Rp[..., None])[:, :, 0]

    return BlockSampler(
        c.chunk, c.vocab, partial(after, run.params, run.frozen), partial(everywhere, run.params, run.frozen),
        name=run.config.name, tokenizer=run.tokenizer.hash[:12],
    )  # fmt: skip


def _score(run: LoadedRun, rows: Rows, starts: Starts, chunk: int | None, o: ScoringOptions) -> Scores:
    if isinstance(run.config.model, CalmConfig):
        return score_blocks(
            block_sampler(run), rows,
            samples=o.samples, seed=o.seed, batch=o.batch, at_once=o.at_once, estimator=o.estimator,
        )  # fmt: skip
    model = of_task(run.task, run.params, run.frozen, name=run.config.name, tokenizer=run.tokenizer.hash[:12])
    return score_next_token(model, rows, starts=starts, chunk=chunk, seed=o.seed, batch=o.batch, at_once=o.at_once)


def result_file(run: str | Path, text: str, step: int) -> Path:
    """Where a run's figures on a text are kept: RUN/eval/brierlm_TEXT_STEP.json."""
    return Path(run) / "eval" / f"brierlm_{text}_{step}.json"


def training_flops(run: LoadedRun) -> float:
    """What the checkpoint cost to train, its autoencoder not included."""
    return run.task.flops_per_token * run.step * run.config.tokens_per_step
