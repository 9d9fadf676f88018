"""Splash attention: the TPU kernel of `attend`, which holds no [T, T] scores and skips blocks that nobody sees.

Shapes: B batch, T tokens of a row, H heads, K key-value heads, h head size.

Who sees whom is what `visible` says, in another form: the kernel compares the places of two tokens in their row, and
their segments. That is the same where positions count up by one along each document of a row, and a document's tokens
lie side by side, as `documents` packing makes them and chunks keep them: two tokens of one document are then as far
apart in the row as in the document, and tokens of different documents differ in their segment.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from ncp_jax.ops.split import devices_along, dividing

TILE = 128  # lanes of a TPU register: the kernel cuts rows into multiples of it
BLOCK = 512  # tokens per block of queries and of keys, where the row's length allows it; assumption: never timed
# One kernel for dq, dk and dv makes the scores once instead of twice (5 matmuls, not 7), but writes a dq for each block
# of keys, to be summed: up to this many. At 8192 tokens it would write 16, and need 1.07 GB of temporaries instead of
# 0.13 (compiled for v5e: 32 heads of 128, bfloat16).
FUSED = 4
KEPT = "attention"  # name, for jax.checkpoint, of what the backward pass needs beside q, k and v


def splash_attend(
    q_BTHh: Array,
    k_BTKh: Array,
    v_BTKh: Array,
    window: int | None,
    segments_BT: Array | None = None,
    split: PartitionSpec | None = None,
    interpret: bool = False,
) -> Array:
    """Causal softmax(q k / sqrt(h)) v of whole rows, with grouped key-value heads, [B, T, H, h] in q's dtype.

    Scores and softmax in float32, also for float64 inputs. q is scaled before the product, so in bfloat16 it is rounded
    once more than in the reference unless h is a power of 4. Any head size is legal; a TPU works in whole lanes, so it
    spends on h what the next multiple of 128 costs. Rows are filled up to whole tiles.

    Args:
        window: visible keys, the query's own included; None: all earlier ones.
        segments_BT: documents of packed rows (see above). A query of segment 0, padding, returns 0.
        split: mesh axes of rows, tokens and heads, under an ambient mesh of more than one device; None: all whole, as
            is any that does not divide. Tokens are split by queries: every device reads the keys of whole rows.
        interpret: let XLA run the kernel's steps one by one: on any platform, slowly.
    """
    B, T, H, h = q_BTHh.shape
    mesh = jax.sharding.get_abstract_mesh()
    wanted = zip(split or (None,) * 3, (B, T, H), strict=True)
    rows, tokens, heads = (dividing(mesh, axes, size) for axes, size in wanted)
    shards = devices_along(mesh, tokens)
    end = -T % (TILE * shards)
    fill = partial(jnp.pad, pad_width=((0, 0), (0, end), (0, 0), (0, 0)))
    k_BKTh, v_BKTh = (_heads_first(_repeated(fill(x), devices_along(mesh, heads))) for x in (k_BTKh, v_BTKh))
    given = [_heads_first(fill(q_BTHh * h**-0.5)), k_BKTh, v_BKTh]
    specs = [PartitionSpec(rows, heads, tokens), PartitionSpec(rows, heads), PartitionSpec(rows, heads)]
    if segments_BT is not None:
        given += [jnp.pad(segments_BT, ((0, 0), (0, end)))] * 2
        specs += [PartitionSpec(rows, tokens), PartitionSpec(rows)]
    kernel = _kernel(T + end, window, shards, interpret)
    if mesh.empty or mesh.size == 1:
        out_BHTh = _by_row(kernel, *given)
    else:
        # A kernel is opaque to the partitioner. check_vma: it does not say over which axes its outputs vary.
        kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, tokens)))
        run = jax.shard_map(_by_row, in_specs=(kernel_spec, *specs), out_specs=specs[0], check_vma=False)
        out_BHTh = run(kernel, *given)
    out_BTHh = out_BHTh[:, :, :T].swapaxes(1, 2)
    return out_BTHh if segments_BT is None else jnp.where(segments_BT[:, :, None, None] > 0, out_BTHh, 0)


def _by_row(kernel: Any, q_BHTh: Array, k_BKJh: Array, v_BKJh: Array, *segments: Array) -> Array:
    """The kernel on each row; `segments`: of queries [B, T] and of keys [B, J], or nothing."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    def one(q_HTh: Array, k_KJh: Array, v_KJh: Array, *segments: Array) -> Array:
        return kernel(q_HTh, k_KJh, v_KJh, SegmentIds(*segments) if segments else None)

    return jax.vmap(one)(q_BHTh, k_BKJh, v_BKJh, *segments)


def _kernel(length: int, window: int | None, shards: int, interpret: bool) -> Any:
    """The kernel for rows of `length`; queries split into `shards`. One mask serves all heads."""
    # Not at the top: importing it takes a second that runs without it need not spend.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape, query_block, key_block = (length, length), _block(length // shards), _block(length)
    if window is None or window >= length:
        mask: Any = splash.CausalMask(shape)
    else:
        mask = splash.LocalMask(shape, (window - 1, 0), 0)  # keys to the left beside the query's own
    fused = length // key_block <= FUSED
    sizes = splash.BlockSizes(
        block_q=query_block, block_kv=key_block, block_q_dkv=query_block, block_kv_dkv=key_block,
        block_q_dq=None if fused else query_block, block_kv_dq=None if fused else key_block,
        use_fused_bwd_kernel=fused,
    )  # fmt: skip
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask]), block_sizes=sizes, head_shards=1, q_seq_shards=shards,
        residual_checkpoint_name=KEPT, interpret=interpret,
    )  # fmt: skip


def _block(tokens: int) -> int:
    """The largest multiple of TILE, up to BLOCK, that divides `tokens`."""
    return max(size for size in range(TILE, BLOCK + 1, TILE) if tokens % size == 0)


def _repeated(x_BTKh: Array, devices: int) -> Array:
    """Key-value heads repeated until they divide over devices; each stays beside the queries that read it."""
    K = x_BTKh.shape[2]
    return jnp.repeat(x_BTKh, math.lcm(K, devices) // K, axis=2)


def _heads_first(x_BTHh: Array) -> Array:
    return x_BTHh.swapaxes(1, 2)
