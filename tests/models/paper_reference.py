"""The NumPy float64 reference of the `paper` preset: Eq. 1-24 of the NCP report, one sequence at a time.

It shares no code with the package and favours plain loops over speed. It reads the package's parameter tree (a nested
dict of arrays, matrices stored [in, out]) and plain `Sizes`. Where the report leaves a choice, this file follows the
project's decisions:

* Block (OLMo-3, post-norm): x + RMS(attention(x)), then x + RMS(SwiGLU(x)). RMS norm of queries and keys before RoPE
  (half-split pairs), over all heads ("full") or within each ("per_head"); H/K query heads share a key/value head.
  A windowed layer sees W keys, the query's own included; layer l (from 1, within its tower) is full when
  l % full_every == 0. Concepts are numbered 0, 1, 2, ... for RoPE and for the concept window.
* The encoder has no final norm. A concept is the mean of the k encoder states of its chunk (Eq. 2), without any norm:
  it is the module input, what the codebook fits, and the target of concept prediction. The concept module and the
  decoder end in an RMS norm, as the backbone does.
* IRC (Eq. 14-18): candidates are the module input and every block output H+R so far. Their weights are
  static + gelu(r w1) w2 with the exact (erf) GELU, where r is the update R (Eq. 14) or, as an option, the output H+R;
  signed, or as an option a softmax. The mix follows every layer, the last one included.
* CRC (Eq. 19-20), after the IRC mix of the layer: T + diagonal * sum_j softmax(gelu(T w1) w2)_j LN(S_j), one LayerNorm
  per path, shared by its sources. Assumption: paths act in sequence, each reading the T that the one before it left.
  Order in the decoder: encoder first, then concept module. Sources are block outputs H+R: the first E-1 of the encoder
  (chunk means) for the concept module, all E of the encoder and all C of the concept module for the decoder.
* Shift (Eq. 11): token t (from 0) receives concept row floor((t+1)/k) - 1, for the fusion and for the CRC. Before the
  first chunk is complete it receives exactly nothing: LayerNorm biases do not enter either. Tokens after the last whole
  chunk keep the last concept; a sequence shorter than a chunk has none. Fusion is h + b (Eq. 12); nothing is gated or
  injected again later.
* Row m (from 0) of the prediction is for chunk m+1 (Eq. 7-10).

LayerNorm has scale, bias and the biased variance; eps sits inside every square root.

Shapes: T tokens, M = T // k concepts, D width, H heads, K key/value heads, h head size, F ffn, S segments, N codes,
W = D/S segment width, V vocabulary, X = T or M (positions of a tower), J sources.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Params = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes and switches; names follow the package's configs."""

    vocab: int
    width: int
    heads: int
    ffn: int
    encoder_layers: int
    concept_layers: int
    decoder_layers: int
    chunk: int
    segments: int
    codes: int
    kv_heads: int | None = None
    qk_norm: str = "full"  # full | per_head
    window: int | None = None  # visible keys, own included; None: every layer full
    concept_window: int | None = None
    full_every: int = 4
    rope_theta: float = 500_000.0
    eps: float = 1e-6
    mix: str = "softmax"  # softmax | raw_logits | hard
    irc_encoder: str = "signed"  # signed | softmax | none
    irc_concept: str = "signed"
    irc_decoder: str = "signed"
    irc_input: str = "update"  # update: R | output: H+R
    concept_from_encoder: bool = True
    decoder_from_encoder: bool = True
    decoder_from_concept: bool = True

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Tower:
    """Every state of one tower: per layer the block output H+R, and the state after IRC and CRC."""

    outputs: list[Array]  # each [X, D]
    states: list[Array]  # each [X, D]


@dataclass(frozen=True)
class Forward:
    """Everything that one sequence produces."""

    encoder: Tower
    concept: Tower
    decoder: Tower
    concepts_MD: Array
    head_logits_MSN: Array
    probabilities_MSN: Array
    predicted_MD: Array
    injected_TD: Array
    logits_TV: Array


def forward(params: Params, tokens_T: Array, sizes: Sizes) -> Forward:
    """Eq. 1-20 for one sequence."""
    length = len(tokens_T)
    encoder = tower(
        params["encoder"], _f64(params["embed"]["table"])[tokens_T], sizes.encoder_layers, sizes.window,
        sizes.irc_encoder, [], sizes,
    )  # fmt: skip
    concepts_MD = chunk_mean(encoder.states[-1], sizes.chunk)  # Eq. 2

    pooled = [chunk_mean(output, sizes.chunk) for output in encoder.outputs[:-1]]
    reads = _reads(params["concept"], "read_encoder", pooled, sizes) if sizes.concept_from_encoder else []
    concept = tower(
        params["concept"], concepts_MD, sizes.concept_layers, sizes.concept_window, sizes.irc_concept, reads, sizes
    )
    u_MD = rms_norm(concept.states[-1], params["concept"]["final_norm"]["scale"], sizes.eps)
    head_logits_MSN, probabilities_MSN, predicted_MD = predict(params["concept"], u_MD, sizes)

    injected_TD = shift_and_repeat(predicted_MD, sizes.chunk, length)  # Eq. 11
    reads = []
    if sizes.decoder_from_encoder:
        reads += _reads(params["decoder"], "read_encoder", encoder.outputs, sizes)
    if sizes.decoder_from_concept:
        # Normed at concept rate and then shifted, so that the rows before the first concept stay exactly zero.
        [(name, normed)] = _reads(params["decoder"], "read_concept", concept.outputs, sizes)
        reads.append((name, [shift_and_repeat(source, sizes.chunk, length) for source in normed]))
    decoder = tower(
        params["decoder"], encoder.states[-1] + injected_TD, sizes.decoder_layers, sizes.window, sizes.irc_decoder,
        reads, sizes,
    )  # fmt: skip
    out_TD = rms_norm(decoder.states[-1], params["decoder"]["final_norm"]["scale"], sizes.eps)
    logits_TV = out_TD @ _f64(params["head"]["kernel"])  # Eq. 13
    return Forward(
        encoder, concept, decoder, concepts_MD, head_logits_MSN, probabilities_MSN, predicted_MD, injected_TD, logits_TV
    )


# --- the equations, one function each ---------------------------------------------------------------------------------


def chunk_mean(x_TD: Array, k: int) -> Array:
    """Eq. 2: c_m is the mean of the k states of chunk m; an unfinished chunk makes no concept. -> [M, D]"""
    rows = [x_TD[m * k : (m + 1) * k].mean(axis=0) for m in range(len(x_TD) // k)]
    return np.array(rows).reshape(len(rows), x_TD.shape[1])


def predict(params: Params, u_MD: Array, sizes: Sizes) -> tuple[Array, Array, Array]:
    """Eq. 8-10: head logits [M, S, N], probabilities [M, S, N], predicted concepts [M, D]."""
    kernel_SDN, bias_SN = _f64(params["heads"]["kernel"]), _f64(params["heads"]["bias"])
    codes_SNW = _f64(params["codebook"]["codes"])
    count = len(u_MD)
    logits_MSN = np.zeros((count, sizes.segments, sizes.codes))
    probabilities_MSN = np.zeros_like(logits_MSN)
    predicted_MD = np.zeros((count, sizes.width))
    for m in range(count):
        for s in range(sizes.segments):
            logits_N = u_MD[m] @ kernel_SDN[s] + bias_SN[s]
            pi_N = softmax(logits_N)
            weights_N = {"softmax": pi_N, "raw_logits": logits_N, "hard": np.eye(sizes.codes)[logits_N.argmax()]}
            wide = sizes.width // sizes.segments
            predicted_MD[m, s * wide : (s + 1) * wide] = weights_N[sizes.mix] @ codes_SNW[s]
            logits_MSN[m, s], probabilities_MSN[m, s] = logits_N, pi_N
    return logits_MSN, probabilities_MSN, predicted_MD


def shift_and_repeat(x_MD: Array, k: int, length: int) -> Array:
    """Eq. 11: token t (from 0) receives row floor((t+1)/k) - 1, or zeros when that is negative. -> [T, D]"""
    out_TD = np.zeros((length, x_MD.shape[1]))
    for t in range(length):
        row = (t + 1) // k - 1
        if row >= 0:
            out_TD[t] = x_MD[row]
    return out_TD


def irc(params: Params, candidates: list[Array], router_XD: Array, kind: str) -> Array:
    """Eq. 14-18: one weight per candidate and position, from the router input of that position. -> [X, D]"""
    weights_XJ = _f64(params["static"]) + gelu(router_XD @ _f64(params["w1"])) @ _f64(params["w2"])
    if kind == "softmax":
        weights_XJ = softmax(weights_XJ)
    mixed_XD = np.zeros_like(router_XD)
    for j, candidate_XD in enumerate(candidates):
        mixed_XD += weights_XJ[:, j : j + 1] * candidate_XD
    return mixed_XD


def crc(params: Params, target_XD: Array, normed_sources: list[Array]) -> Array:
    """Eq. 19-20: the target plus a per-channel scaled softmax mix of the normed sources. -> [X, D]"""
    weights_XJ = softmax(gelu(target_XD @ _f64(params["w1"])) @ _f64(params["w2"]))
    mixed_XD = np.zeros_like(target_XD)
    for j, source_XD in enumerate(normed_sources):
        mixed_XD += weights_XJ[:, j : j + 1] * source_XD
    return target_XD + _f64(params["diagonal"]) * mixed_XD


def tower(
    params: Params,
    input_XD: Array,
    layers: int,
    window: int | None,
    irc_kind: str,
    reads: list[tuple[str, list[Array]]],
    sizes: Sizes,
) -> Tower:
    """One tower: per layer a block, the IRC mix, then each CRC in turn. `reads` pairs a route name and its sources."""
    state_XD, candidates = input_XD, [input_XD]
    outputs, states = [], []
    for layer in range(layers):
        full = window is None or (layer + 1) % sizes.full_every == 0
        weights = {name: _f64(leaf)[layer] for name, leaf in params["blocks"].items()}
        output_XD = block(weights, state_XD, None if full else window, sizes)
        candidates.append(output_XD)
        router_XD = output_XD if sizes.irc_input == "output" else output_XD - state_XD
        mixes = irc_kind != "none"
        state_XD = irc(params[f"irc_{layer}"], candidates, router_XD, irc_kind) if mixes else output_XD
        for name, sources in reads:
            state_XD = crc(params[f"{name}_{layer}"], state_XD, sources)
        outputs.append(output_XD)
        states.append(state_XD)
    return Tower(outputs, states)


def block(weights: Params, x_XD: Array, window: int | None, sizes: Sizes) -> Array:
    """One OLMo-3 block, H + R: post-norm attention, then post-norm SwiGLU. -> [X, D]"""
    x_XD = x_XD + rms_norm(attention(weights, x_XD, window, sizes), weights["attention_norm"], sizes.eps)
    gate_XF, up_XF = x_XD @ weights["w_gate"], x_XD @ weights["w_up"]
    swiglu_XD = (gate_XF / (1 + np.exp(-gate_XF)) * up_XF) @ weights["w_down"]
    return x_XD + rms_norm(swiglu_XD, weights["mlp_norm"], sizes.eps)


def attention(weights: Params, x_XD: Array, window: int | None, sizes: Sizes) -> Array:
    """Causal attention, query by query: position i sees max(0, i-W+1) .. i. -> [X, D]"""
    count = len(x_XD)
    q_XHh = np.einsum("xd,dhe->xhe", x_XD, weights["wq"])
    k_XKh = np.einsum("xd,dke->xke", x_XD, weights["wk"])
    v_XKh = np.einsum("xd,dke->xke", x_XD, weights["wv"])
    q_XHh = rope(_head_norm(q_XHh, weights["q_norm"], sizes), sizes.rope_theta)
    k_XKh = rope(_head_norm(k_XKh, weights["k_norm"], sizes), sizes.rope_theta)
    out_XD = np.zeros((count, sizes.width))
    for i in range(count):
        first = 0 if window is None else max(0, i - window + 1)
        for head in range(sizes.heads):
            shared = head // (sizes.heads // sizes.kv)
            scores = k_XKh[first : i + 1, shared] @ q_XHh[i, head] / math.sqrt(sizes.head_dim)
            out_XD[i] += softmax(scores) @ v_XKh[first : i + 1, shared] @ weights["wo"][head]
    return out_XD


def rope(x_XHh: Array, theta: float) -> Array:
    """Rotate the pairs (i, i + h/2) of every head by position * theta^(-2i/h)."""
    half = x_XHh.shape[-1] // 2
    out_XHh = np.empty_like(x_XHh)
    for position in range(len(x_XHh)):
        for i in range(half):
            angle = position * theta ** (-2 * i / x_XHh.shape[-1])
            a, b = x_XHh[position, :, i], x_XHh[position, :, i + half]
            out_XHh[position, :, i] = a * math.cos(angle) - b * math.sin(angle)
            out_XHh[position, :, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out_XHh


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """scale * x / sqrt(mean(x^2) + eps), over the last axis."""
    return _f64(scale) * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def layer_norm(x: Array, params: Params, eps: float) -> Array:
    """scale * (x - mean) / sqrt(biased variance + eps) + bias, over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return _f64(params["scale"]) * centred / np.sqrt(variance + eps) + _f64(params["bias"])


def gelu(x: Array) -> Array:
    """x * Phi(x), exact."""
    return x * np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.ravel()]).reshape(x.shape)


def softmax(x: Array) -> Array:
    """Over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# --- losses; what the report puts behind a stop-gradient is an argument of its own ------------------------------------


def ntp_loss(logits_TV: Array, targets: Array) -> float:
    """Eq. 23: mean cross-entropy, nats. `targets[t]` follows token t: T-1 of them, or T if the next one is known."""
    losses = []
    for t, target in enumerate(targets):
        row = logits_TV[t]
        losses.append(row.max() + math.log(np.exp(row - row.max()).sum()) - row[target])
    return float(np.mean(losses))


def nearest_codes(concepts_MD: Array, codes_SNW: Array) -> Array:
    """Eq. 4-5: index of the closest code of each segment. -> int [M, S]"""
    segments, _, wide = codes_SNW.shape
    out_MS = np.zeros((len(concepts_MD), segments), dtype=int)
    for m, concept_D in enumerate(concepts_MD):
        for s in range(segments):
            distance_N = ((concept_D[s * wide : (s + 1) * wide] - codes_SNW[s]) ** 2).sum(axis=1)
            out_MS[m, s] = distance_N.argmin()
    return out_MS


def vq_loss(codes_SNW: Array, frozen_concepts_MD: Array, reduction: str = "sum") -> float:
    """Eq. 21: distance of the frozen concepts to their nearest codes.

    `sum`: squared norms over M*S, as printed. `mean`: over all M*D elements. Without concepts: 0.
    """
    codes_SNW = _f64(codes_SNW)
    segments, _, wide = codes_SNW.shape
    count = len(frozen_concepts_MD)
    chosen_MS = nearest_codes(frozen_concepts_MD, codes_SNW)
    total = 0.0
    for m in range(count):
        for s in range(segments):
            total += ((frozen_concepts_MD[m, s * wide : (s + 1) * wide] - codes_SNW[s, chosen_MS[m, s]]) ** 2).sum()
    return total / max(count * segments * {"sum": 1, "mean": wide}[reduction], 1)


def ncp_loss(predicted_MD: Array, frozen_concepts_MD: Array, segments: int, reduction: str = "sum") -> float:
    """Eq. 22: row m of the prediction against the frozen concept m+1.

    `sum`: squared norms over M-1, as printed. `per_segment`: over (M-1)*S, Algorithm 1. `mean`: over (M-1)*D.
    With fewer than two concepts: 0.
    """
    count, width = frozen_concepts_MD.shape
    total = sum(((predicted_MD[m] - frozen_concepts_MD[m + 1]) ** 2).sum() for m in range(count - 1))
    return total / max((count - 1) * {"sum": 1, "per_segment": segments, "mean": width}[reduction], 1)


def code_cross_entropy(head_logits_MSN: Array, frozen_codes_MS: Array) -> float:
    """The classification twin of Eq. 22: mean over (M-1)*S of -log pi(nearest code of the next concept), nats."""
    count, segments, _ = head_logits_MSN.shape
    losses = [
        -math.log(softmax(head_logits_MSN[m, s])[frozen_codes_MS[m + 1, s]])
        for m in range(count - 1)
        for s in range(segments)
    ]
    return float(np.mean(losses)) if losses else 0.0


def losses(
    params: Params,
    tokens_T: Array,
    targets: Array,
    sizes: Sizes,
    frozen_concepts_MD: Array,
    *,
    ncp_reduction: str = "sum",
    vq_reduction: str = "sum",
    alpha: float = 1.0,
    beta: float = 1.0,
) -> dict[str, float]:
    """All terms of one sequence: ntp, ncp, vq, code_ce, and Eq. 24's total = ntp + alpha ncp + beta vq.

    `frozen_concepts_MD` holds the concepts as they stand behind stop-gradients (NCP target, VQ input, and the concepts
    whose nearest codes code_ce predicts): take `forward(params, ...).concepts_MD` once, keep it while `params` moves.
    """
    out = forward(params, tokens_T, sizes)
    codes_SNW = _f64(params["concept"]["codebook"]["codes"])
    ntp = ntp_loss(out.logits_TV, targets)
    ncp = ncp_loss(out.predicted_MD, frozen_concepts_MD, sizes.segments, ncp_reduction)
    vq = vq_loss(codes_SNW, frozen_concepts_MD, vq_reduction)
    code_ce = code_cross_entropy(out.head_logits_MSN, nearest_codes(frozen_concepts_MD, codes_SNW))
    return {"ntp": ntp, "ncp": ncp, "vq": vq, "code_ce": code_ce, "total": ntp + alpha * ncp + beta * vq}


def _reads(params: Params, name: str, sources: list[Array], sizes: Sizes) -> list[tuple[str, list[Array]]]:
    return [(name, [layer_norm(source, params[f"{name}_norm"], sizes.eps) for source in sources])]


def _head_norm(x_XHh: Array, scale: Array, sizes: Sizes) -> Array:
    if sizes.qk_norm == "per_head":
        return rms_norm(x_XHh, scale, sizes.eps)
    flat = x_XHh.reshape(len(x_XHh), scale.size)
    return rms_norm(flat, scale.reshape(-1), sizes.eps).reshape(x_XHh.shape)


def _f64(x: Any) -> Array:
    return np.asarray(x, dtype=np.float64)
