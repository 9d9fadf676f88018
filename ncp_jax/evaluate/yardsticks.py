"""Yardsticks without a model: bits per held-out byte of a byte n-gram and of xz, given the same training text.

A language model that does not beat them has learned little. Shapes: N held-out bytes.
"""

import lzma
from collections.abc import Iterable, Sequence

import numpy as np

ALPHABET = 256  # bytes; the n-grams add one symbol, 0, for what comes before a document
LARGEST_ORDER = 7  # 257^7 is the largest power of the alphabet's size that fits a 64-bit key


def yardsticks(train: Sequence[str], held_out: Sequence[str]) -> dict[str, float]:
    """Bits per held-out UTF-8 byte of each yardstick, by name. Raises ValueError when either side is empty."""
    model = KneserNey(_encoded(train, "training"), order=5)
    return {
        "byte 5-gram (Kneser-Ney)": model.bits_per_byte(_encoded(held_out, "held-out")),
        "xz -9e": xz_bits_per_byte(train, held_out),
    }


def xz_bits_per_byte(train: Sequence[str], held_out: Sequence[str]) -> float:
    """What the held-out text adds to the training text's xz file: 8 (|xz(train + held_out)| - |xz(train)|) / bytes.

    Documents are joined without separators, in the order given. That order moves the figure by a few thousandths.
    """
    known, new = (b"".join(_encoded(texts, what)) for texts, what in ((train, "training"), (held_out, "held-out")))
    return 8 * (_xz_size(known + new) - _xz_size(known)) / len(new)


class KneserNey:
    """Interpolated Kneser-Ney over bytes (Kneser and Ney 1995; Chen and Goodman 1999, section 2.7).

        P_m(b | h) = (max(c_m(hb) - D_m, 0) + D_m |{b' : c_m(hb') > 0}| P_{m-1}(b | h')) / sum_b' c_m(hb')

    with h' the context without its oldest byte, P_m = P_{m-1} for a context never seen, and P_0 uniform over 256 bytes.
    c of the highest order counts occurrences; c of a lower order counts the distinct bytes seen before the n-gram.
    One discount per order, D = n1 / (n1 + 2 n2), n1 and n2 being the numbers of n-grams with count 1 and 2.
    Documents are independent: each starts after order-1 start symbols, which count as context and are never predicted.
    Nothing is fitted to held-out text.
    """

    def __init__(self, documents: Iterable[bytes], order: int = 5):
        if not 1 <= order <= LARGEST_ORDER:
            raise ValueError(f"n-gram order {order} is outside 1..{LARGEST_ORDER} (64-bit keys); choose one inside")
        self.order = order
        keys = _ngrams(documents, order)
        if not len(keys):
            raise ValueError("the n-gram's training text has no bytes; pass at least one document that has")
        grams, counts = np.unique(keys, return_counts=True)
        self.levels = [_Level(grams, counts)]
        for length in range(order - 1, 0, -1):
            # Distinct longer n-grams with one suffix differ in their first byte alone.
            grams, counts = np.unique(grams % _power(length), return_counts=True)
            self.levels.insert(0, _Level(grams, counts))

    def distribution(self, history: bytes) -> np.ndarray:
        """P(next byte | history) for all bytes, float64 [256]. A history shorter than order-1 starts a document."""
        symbols = [0] * (self.order - 1) + [byte + 1 for byte in history]
        context = 0
        for symbol in symbols[len(symbols) - self.order + 1 :]:
            context = context * (ALPHABET + 1) + symbol
        return self._probabilities(np.arange(1, ALPHABET + 1, dtype=np.uint64) + np.uint64(context * (ALPHABET + 1)))

    def bits_per_byte(self, documents: Iterable[bytes]) -> float:
        """Mean -log2 P over every byte of the documents."""
        keys = _ngrams(documents, self.order)
        if not len(keys):
            raise ValueError("the held-out text has no bytes; pass at least one document that has")
        return float(-np.log2(self._probabilities(keys)).mean())

    def _probabilities(self, keys_N: np.ndarray) -> np.ndarray:
        p_N = np.full(len(keys_N), 1 / ALPHABET)
        for length, level in enumerate(self.levels, start=1):
            p_N = level.interpolate(keys_N % _power(length), p_N)
        return p_N


class _Level:
    """N-grams of one length as sorted keys, with their discounted counts and what their contexts pass down."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray):
        ones, twos = int((counts == 1).sum()), int((counts == 2).sum())
        discount = ones / (ones + 2 * twos) if ones else 0.0
        self.grams, self.discounted = grams, counts - discount
        self.contexts, position = np.unique(grams // np.uint64(ALPHABET + 1), return_inverse=True)
        self.totals = np.bincount(position, weights=counts)
        self.passed_down = discount * np.bincount(position)

    def interpolate(self, keys_N: np.ndarray, lower_N: np.ndarray) -> np.ndarray:
        gram_N, known_N = _find(self.grams, keys_N)
        context_N, seen_N = _find(self.contexts, keys_N // np.uint64(ALPHABET + 1))
        own_N = np.where(known_N, self.discounted[gram_N], 0.0)
        mixed_N = (own_N + self.passed_down[context_N] * lower_N) / self.totals[context_N]
        return np.where(seen_N, mixed_N, lower_N)


def _ngrams(documents: Iterable[bytes], order: int) -> np.ndarray:
    """Key of the n-gram that ends at each byte, uint64 [N]: its symbols as digits in base 257."""
    keys = [np.zeros(0, np.uint64)]
    for document in documents:
        symbols = np.frombuffer(document, np.uint8).astype(np.uint64) + np.uint64(1)
        padded = np.concatenate([np.zeros(order - 1, np.uint64), symbols])
        key_N = np.zeros(len(symbols), np.uint64)
        for start in range(order):
            key_N = key_N * np.uint64(ALPHABET + 1) + padded[start : start + len(symbols)]
        keys.append(key_N)
    return np.concatenate(keys)


def _find(table: np.ndarray, wanted_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(place in the sorted table, whether it is there)."""
    place_N = np.minimum(np.searchsorted(table, wanted_N), len(table) - 1)
    return place_N, table[place_N] == wanted_N


def _power(length: int) -> np.uint64:
    return np.uint64((ALPHABET + 1) ** length)


def _xz_size(data: bytes) -> int:
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def _encoded(texts: Sequence[str], what: str) -> list[bytes]:
    encoded = [text.encode() for text in texts]
    if not any(encoded):
        raise ValueError(f"the {what} text has no bytes ({len(texts)} documents); pass at least one that has some")
    return encoded
