"""The tokenizer: a Hugging Face tokenizer.json, read with `tokenizers`, with the facts that training needs of it."""

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from ncp_jax.data.store import DataError, read_file, write_file

EOS = "<|endoftext|>"
# Names that published tokenizers give to the token that ends a document, most specific first.
EOS_NAMES = (EOS, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
# 256 bytes and one special token: every text can be written with these.
SMALLEST_BPE = 257
# Words, numbers of up to three digits, punctuation, line breaks and spaces apart: the pre-tokenizer of GPT-4 (cl100k),
# which the dolma2 and Llama-3 tokenizers also use.
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerError(DataError):
    """A tokenizer that cannot be read or lacks what training needs."""


class Tokenizer:
    """Text to ids and back. Special tokens written out in a text are encoded as ordinary text."""

    def __init__(self, content: bytes, *, eos: str | None = None, origin: str = "tokenizer.json"):
        """`content`: the tokenizer.json; `eos`: name of the end-of-text token where it is not one of EOS_NAMES."""
        self.content, self.origin = content, origin
        try:
            self._hf = HFTokenizer.from_buffer(content)
        except Exception as error:  # the Rust reader raises plain Exception
            raise TokenizerError(f"{origin} is not a Hugging Face tokenizer.json: {error}") from None
        self._hf.encode_special_tokens = True  # "<|endoftext|>" in a document must not end it
        self._hf.no_truncation()
        self._hf.no_padding()
        self.eos_name, self.eos = self._find_eos(eos)

    @classmethod
    def load(cls, path: str | os.PathLike, *, eos: str | None = None) -> "Tokenizer":
        """Read a tokenizer.json from a local path or URL. Raises TokenizerError."""
        folder, name = os.path.split(os.fspath(path))
        content = read_file(folder or ".", name)
        if content is None:
            raise TokenizerError(
                f"no tokenizer at {os.fspath(path)}; give a Hugging Face tokenizer.json or --train-bpe VOCAB"
            )
        return cls(content, eos=eos, origin=os.fspath(path))

    @functools.cached_property
    def size(self) -> int:
        """Full id space: largest id + 1, added tokens included."""
        return max(self._hf.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 of the tokenizer.json."""
        return hashlib.sha256(self.content).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any token that the tokenizer would put around it."""
        return self._hf.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of several texts, in parallel threads."""
        return [encoding.ids for encoding in self._hf.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens written out."""
        return self._hf.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        """int32 [size]: UTF-8 bytes of text that each id stands for; 0 for special tokens and unused ids.

        For a byte-level BPE the bytes of a text's ids sum to the text's bytes.
        """
        sizes = np.zeros(self.size, np.int32)
        added = self._hf.get_added_tokens_decoder()
        count = len if self._byte_level else _sentencepiece_bytes  # byte level: one printed character per byte
        for token, index in self._hf.get_vocab(with_added_tokens=True).items():
            if index in added:
                sizes[index] = 0 if added[index].special else len(token.encode())
            else:
                sizes[index] = count(token)
        sizes[self.eos] = 0
        return sizes

    @functools.cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self.content).get("decoder"))

    def _find_eos(self, name: str | None) -> tuple[str, int]:
        for candidate in (name,) if name else EOS_NAMES:
            index = self._hf.token_to_id(candidate)
            if index is not None:
                return candidate, index
        if name:
            raise TokenizerError(f"{self.origin} has no token '{name}'; give --eos the name of its end-of-text token")
        raise TokenizerError(
            f"{self.origin} has none of the end-of-text tokens {', '.join(EOS_NAMES)}; name its own with --eos"
        )


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab` ids, `<|endoftext|>` (id 0) included; the same texts give the same file.

    Raises TokenizerError for a vocabulary below 257 or texts without content.
    """
    if vocab < SMALLEST_BPE:
        raise TokenizerError(f"--train-bpe {vocab} is below {SMALLEST_BPE}: 256 bytes and {EOS}; use 512 or more")
    hf = HFTokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    hf.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    hf.train_from_iterator(texts, trainer)
    return Tokenizer(hf.to_str().encode(), origin="the trained tokenizer")


def save(tokenizer: Tokenizer, path: str | os.PathLike) -> None:
    """Write the tokenizer.json atomically. Raises DataError if the place is not writable."""
    folder, name = os.path.split(os.fspath(path))
    write_file(folder or ".", name, tokenizer.content)


def _sentencepiece_bytes(token: str) -> int:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):  # byte fallback
        return 1
    return len(token.replace("▁", " ").encode())  # U+2581 stands for a space
