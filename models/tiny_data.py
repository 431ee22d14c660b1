"""Text for the tiny checkpoint: the Python standard library's own source, as bytes.

Every machine that can run this project has it, so nothing is downloaded. A token is a byte; 256 ends
a file. Which files are held out depends on their path alone, so the split is the same everywhere.
"""

import hashlib
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

EOS_ID = 256
PAD_ID = 257
VOCAB_SIZE = 320  # 256 bytes + 2 specials, padded to a multiple of 64

# Generated number tables and build settings teach nothing about Python text.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
HELD_OUT_ONE_IN = 40

KINDS = ("whitespace", "identifier", "keyword", "number", "operator", "string", "comment", "end")
_KEYWORDS = (
    "and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|"
    "global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield|"
    "None|True|False|self"
)
_TRIPLE = r'"""(?:\\.|[^\\])*?"""' + r"|'''(?:\\.|[^\\])*?'''"
_SINGLE = r'"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])*'"
_KIND_PATTERN = re.compile(
    rf"(?P<comment>[#][^\n]*)|(?P<string>{_TRIPLE}|{_SINGLE})|(?P<whitespace>\s+)"
    rf"|(?P<keyword>\b(?:{_KEYWORDS})\b)|(?P<identifier>[A-Za-z_]\w*)|(?P<number>\d[\w.]*)"
    r"|(?P<operator>.)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Corpus:
    """Token ids (int16, 1-D) of the two splits, and what they were made from."""

    train: np.ndarray
    held_out: np.ndarray
    held_out_kinds: np.ndarray  # uint8, index into KINDS for each held-out token
    files: int
    held_out_files: tuple[str, ...]
    digest: str


def standard_library() -> Path:
    """The folder this interpreter's standard library lives in."""
    return Path(os.__file__).parent


def source_files(root: Path) -> list[Path]:
    """All .py files under root, sorted by path, without SKIPPED_FOLDERS and build settings."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(n for n in folders if n not in SKIPPED_FOLDERS and "config-" not in n)
        wanted = (n for n in sorted(names) if n.endswith(".py") and not n.startswith("_sysconfig"))
        found.extend(Path(folder) / name for name in wanted)
    return found


def is_held_out(relative_path: str) -> bool:
    """True for about one file in HELD_OUT_ONE_IN; a function of the path alone."""
    return zlib.crc32(relative_path.encode()) % HELD_OUT_ONE_IN == 0


def encode(data: bytes) -> np.ndarray:
    """Bytes of one file to token ids (int16), closed by EOS_ID."""
    return np.append(np.frombuffer(data, dtype=np.uint8).astype(np.int16), np.int16(EOS_ID))


def kinds_of(data: bytes) -> np.ndarray:
    """The kind (index into KINDS) of each byte of one file, plus one "end" for the closing id.

    A regular expression, not the real tokenizer: it must label any text, broken code included.
    """
    kinds = np.full(len(data) + 1, KINDS.index("end"), dtype=np.uint8)
    text = data.decode("latin-1")  # one character per byte, so spans are byte offsets
    for match in _KIND_PATTERN.finditer(text):
        kinds[match.start() : match.end()] = KINDS.index(str(match.lastgroup))
    return kinds


def build_corpus(root: Path | None = None, max_bytes: int | None = None) -> Corpus:
    """Read the corpus under `root` (default: this interpreter's standard library).

    max_bytes stops early, once that many bytes of training text are read (the smoke run).
    """
    root = root or standard_library()
    train, held_out, kinds, names = [], [], [], []
    digest, total, files = hashlib.sha256(), 0, 0
    for path in source_files(root):
        name, data = path.relative_to(root).as_posix(), path.read_bytes()
        digest.update(data)
        files += 1
        if is_held_out(name):
            names.append(name)
            held_out.append(encode(data))
            kinds.append(kinds_of(data))
            continue
        train.append(encode(data))
        total += len(data)
        if max_bytes is not None and total >= max_bytes and held_out:
            break
    return Corpus(
        train=np.concatenate(train),
        held_out=np.concatenate(held_out),
        held_out_kinds=np.concatenate(kinds),
        files=files,
        held_out_files=tuple(names),
        digest=digest.hexdigest(),
    )
