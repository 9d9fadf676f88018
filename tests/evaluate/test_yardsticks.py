"""The yardsticks: probabilities that sum to one, values worked out by hand, a slow twin, stable figures."""

import lzma
from collections import Counter, defaultdict

import numpy as np
import pytest

from ncp_jax.evaluate.yardsticks import LARGEST_ORDER, KneserNey, xz_bits_per_byte, yardsticks

VERSES = [
    "This is the house that Jack built.\n",
    "This is the malt that lay in the house that Jack built.\n",
    "This is the rat that ate the malt that lay in the house that Jack built.\n",
    "This is the cat that killed the rat that ate the malt that lay in the house that Jack built.\n",
    "This is the dog that worried the cat that killed the rat that ate the malt that lay in the house.\n",
]
NEW = [
    "This is the cow with the crumpled horn that tossed the dog that worried the cat that killed the rat — etc.\n",
    "Der Hund, der die Katze biß.\n",
]
KN_FIGURE, XZ_FIGURE = 3.0275892790687258, 3.68


def encoded(texts):
    return [text.encode() for text in texts]


def test_bigram_by_hand():
    """One document, aabab. Bigrams with the start: ^a 1, aa 1, ab 2, ba 1, so D = 3 / (3 + 2) = 0.6.

    Distinct predecessors: a has ^, a, b; b has a; one count is 1 and none is 2, so D = 1 below.
    """
    model = KneserNey([b"aabab"], order=2)
    below_a, below_b, below_other = (3 - 1) / 4 + 2 / 4 / 256, 2 / 4 / 256, 2 / 4 / 256
    after_a, start, unseen = model.distribution(b"a"), model.distribution(b""), model.distribution(b"z")
    assert after_a[ord("b")] == pytest.approx((2 - 0.6) / 3 + 0.6 * 2 / 3 * below_b, rel=1e-12)
    assert after_a[ord("a")] == pytest.approx((1 - 0.6) / 3 + 0.6 * 2 / 3 * below_a, rel=1e-12)
    assert after_a[ord("c")] == pytest.approx(0.6 * 2 / 3 * below_other, rel=1e-12)
    assert start[ord("a")] == pytest.approx((1 - 0.6) / 1 + 0.6 * below_a, rel=1e-12)
    assert unseen[ord("a")] == pytest.approx(below_a, rel=1e-12)
    bits = -np.log2([start[ord("a")], after_a[ord("b")]]).mean()
    assert model.bits_per_byte([b"ab"]) == pytest.approx(bits, rel=1e-12)


@pytest.mark.parametrize("order", range(1, LARGEST_ORDER + 1))
def test_every_distribution_sums_to_one(order):
    model = KneserNey(encoded(VERSES), order)
    rng = np.random.default_rng(order)
    text = "".join(VERSES).encode()
    starts = rng.integers(0, len(text) - 10, size=30)
    histories = [b"", b"T", *(text[start : start + 10] for start in starts), *(rng.bytes(9) for _ in range(10))]
    for history in histories:
        p = model.distribution(history)
        assert p.shape == (256,)
        assert (p > 0).all()
        assert p.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_equals_the_recursion_written_with_dictionaries(order):
    model, slow = KneserNey(encoded(VERSES), order), slow_kneser_ney(encoded(VERSES), order)
    nll = []
    for document in encoded(NEW):
        padded = [0] * (order - 1) + [byte + 1 for byte in document]
        for i, byte in enumerate(document):
            nll.append(-np.log2(slow(tuple(padded[i : i + order - 1]), byte + 1)))
            assert model.distribution(document[:i])[byte] == pytest.approx(2 ** -nll[-1], rel=1e-12)
    assert model.bits_per_byte(encoded(NEW)) == pytest.approx(np.mean(nll), rel=1e-12)


def test_documents_are_independent():
    model = KneserNey(encoded(VERSES))
    first, second = (document.encode() for document in NEW)
    together, apart = model.bits_per_byte([first, second]), [model.bits_per_byte([d]) for d in (first, second)]
    assert together == pytest.approx(np.average(apart, weights=[len(first), len(second)]), rel=1e-12)
    assert together != pytest.approx(model.bits_per_byte([first + second]), abs=1e-6)


def test_figures_are_stable():
    """xz may change by some bytes between versions of liblzma; the n-gram may not."""
    figures = yardsticks(VERSES, NEW)
    assert list(figures) == ["byte 5-gram (Kneser-Ney)", "xz -9e"]
    assert figures["byte 5-gram (Kneser-Ney)"] == pytest.approx(KN_FIGURE, abs=1e-9)
    assert figures["xz -9e"] == pytest.approx(XZ_FIGURE, abs=0.4)
    assert figures == yardsticks(VERSES, NEW)


def test_xz_counts_what_the_new_text_adds():
    known, new = "".join(VERSES).encode(), "".join(NEW).encode()
    sizes = [len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) for data in (known + new, known)]
    assert xz_bits_per_byte(VERSES, NEW) == 8 * (sizes[0] - sizes[1]) / len(new)
    assert xz_bits_per_byte(VERSES, VERSES) < 1 < xz_bits_per_byte(VERSES, NEW)


def test_errors_say_what_to_change():
    with pytest.raises(ValueError, match=r"order 8 is outside 1\.\.7"):
        KneserNey([b"abc"], order=8)
    with pytest.raises(ValueError, match=r"training text has no bytes \(2 documents\)"):
        yardsticks(["", ""], NEW)
    with pytest.raises(ValueError, match=r"held-out text has no bytes \(0 documents\)"):
        yardsticks(VERSES, [])


def slow_kneser_ney(documents, order):
    counts = {order: Counter()}
    for document in documents:
        padded = [0] * (order - 1) + [byte + 1 for byte in document]
        counts[order].update(tuple(padded[i : i + order]) for i in range(len(document)))
    for m in range(order - 1, 0, -1):
        counts[m] = Counter(gram[1:] for gram in counts[m + 1])
    discounts, followers = {}, {}
    for m, table in counts.items():
        n1, n2 = (sum(count == value for count in table.values()) for value in (1, 2))
        discounts[m] = n1 / (n1 + 2 * n2) if n1 else 0.0
        followers[m] = defaultdict(list)
        for gram, count in table.items():
            followers[m][gram[:-1]].append(count)

    def probability(context, symbol):
        m = len(context) + 1
        lower = probability(context[1:], symbol) if context else 1 / 256
        seen = followers[m].get(context)
        if not seen:
            return lower
        own = max(counts[m][(*context, symbol)] - discounts[m], 0)
        return (own + discounts[m] * len(seen) * lower) / sum(seen)

    return probability
