"""Corpus reader: four formats read alike, and each kind of bad input told apart."""

import gzip
import json

import pytest
import zstandard

from ncp_jax.data.documents import InputError, documents, find_sources, fingerprint

TEXTS = ["one", "zwei ☂\u2028 still one line", "", "four\nlines"]
LINES = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()


def read(file, text_key="text"):
    return [document.text for document in documents(file, text_key=text_key)]


def compressed(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content)
    return zstandard.compress(content) if name.endswith(".zst") else content


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_formats_hold_the_same_documents(tmp_path, name):
    file = tmp_path / name
    file.write_bytes(compressed(name, LINES))
    assert read(file) == TEXTS
    first = next(documents(file, text_key="text"))
    assert (first.origin, first.bytes, first.sha1) == (f"{file}:1", 3, "fe05bcdcdc4928012781a5f1a2a77cbb5398e106")
    file.write_bytes(compressed(name, LINES[:20]) + compressed(name, LINES[20:] + b"\n\n" + LINES.rstrip()))
    assert read(file) == TEXTS * 2  # two archive members, blank lines, no newline at the end


def test_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"line\r\nline\n")
    assert read(tmp_path / "a.txt") == ["line\r\nline\n"]


def test_progress_adds_up_to_the_file(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES * 1000))
    seen = []
    list(documents(tmp_path / "a.jsonl.gz", text_key="text", progress=seen.append))
    assert sum(seen) == fingerprint(tmp_path / "a.jsonl.gz")["bytes"]


def test_directories_are_searched_in_order(tmp_path):
    for name in ("b.txt", "deep/a.jsonl", ".hidden/c.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert list(find_sources([str(tmp_path)])) == ["b.txt", "deep/a.jsonl"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.99])
def test_truncated_archive(tmp_path, name, kept):
    content = compressed(name, b"".join(json.dumps({"text": str(hash(n))}).encode() + b"\n" for n in range(30_000)))
    (tmp_path / name).write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(InputError, match=rf"{name} is truncated: .* ends after \d+ bytes"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_archive_that_is_none(tmp_path, name):
    (tmp_path / name).write_bytes(LINES)
    with pytest.raises(InputError, match=f"{name} is corrupt"):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', r"a\.jsonl:5 is not JSON and has no newline: the file looks truncated"),
        (b'{"text": x}\n', r"a\.jsonl:5 is not JSON \("),
        (b'{"body": "x", "id": 1}\n', r"a\.jsonl:5 has no key 'text'; its keys: body, id; see --text-key"),
        (b'{"text": 3}\n', r"a\.jsonl:5: 'text' is int, not text"),
        (b'["text"]\n', r"a\.jsonl:5 is a JSON list"),
        (b'{"text": "\\ud83d"}\n', r"a\.jsonl:5: character 0 is half a surrogate pair"),
        (b'{"text": "caf\xe9"}\n', rf"a\.jsonl is not UTF-8: byte 0xe9 at offset {len(LINES) + 13} \(line 5\)"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(LINES + line)
    with pytest.raises(InputError, match=message):
        read(tmp_path / "a.jsonl")


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xff")
    with pytest.raises(InputError, match=r"a\.txt is not UTF-8: byte 0xff at offset 11 \(line 3\)"):
        read(tmp_path / "a.txt")


def test_bad_paths(tmp_path):
    with pytest.raises(InputError, match=r"no such file or directory: .*absent"):
        find_sources([str(tmp_path / "absent")])
    (tmp_path / "a.pdf").touch()
    with pytest.raises(InputError, match=r"a\.pdf is none of \.txt, \.jsonl"):
        find_sources([str(tmp_path / "a.pdf")])
    with pytest.raises(InputError, match=r"holds no \.txt"):
        find_sources([str(tmp_path)])
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").touch()
    with pytest.raises(InputError, match=r"two sources are called 'a\.txt'"):
        find_sources([str(tmp_path / "x"), str(tmp_path / "y")])
