"""Identifies the weights of a model, so that pages of different weights have different keys.

A model's name is not enough: two teams may serve different fine-tunes as "chat", and a folder may
get new weights. The identity comes from the weights themselves if this host can read them:

* a folder or file: a digest of its configuration and code, of the names and sizes of its weight
  files, and of samples of their bytes. The path is not part of it: hosts mount the same model at
  different paths.
* a snapshot of Hugging Face's cache: the repository, the commit, and this digest, because people
  edit the configuration of a snapshot.
* anything else (an object store): the path and the revision passed to the server.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

SAMPLES = 1024
"""Blocks that are read from all weight files together: 4 MiB, in 0.1 s from a local disk. A
training run changes far more than a 1,024th of the weights."""

BLOCK_BYTES = 4096

TEXT_BYTES_MAX = 64 << 20
"""The index of the largest known model has 12 MiB."""

WEIGHT_SUFFIXES = frozenset({".bin", ".ckpt", ".gguf", ".npz", ".pt", ".pth", ".safetensors"})

TEXT_SUFFIXES = frozenset({".json", ".py"})
"""Files that say how weights and inputs are used: configurations of the model, of quantization and
of preprocessors, the index of the weights, code of the model."""

HARMLESS = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)
"""Files of these suffixes that change no page: page keys are of token ids, whatever text they came
from, and how tokens are drawn does not change what is computed for them."""

CONFIGURATIONS = ("config.json", "adapter_config.json", "params.json")
"""Files by which a snapshot is found: each repository has one of them."""

_SNAPSHOT = re.compile(r"/models--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40,64})$")


def weights_identity(path: str, revision: str | None = None, cache: str | None = None) -> str:
    """Return a text that is equal on two hosts if they serve the same weights from `path`.

    path:     a folder, a file, a repository of Hugging Face or an address in an object store.
    revision: branch, tag or commit of a repository.
    cache:    the folder that repositories are downloaded to, if it is not the default.
    """
    found = Path(path)
    if not found.exists():
        snapshot = _snapshot(path, revision, cache)
        if snapshot is None:
            return f"{path}@{revision}" if revision else path
        found = snapshot
    at_commit = _SNAPSHOT.search(str(found.absolute()))
    named = f"{path}@{revision}" if revision else path
    if at_commit is not None:
        named = f"{at_commit['repository'].replace('--', '/')}@{at_commit['commit']}"
    try:
        digest = content_digest(found)
    except OSError:
        return named
    return digest if at_commit is None else f"{named} {digest}"


def content_digest(place: Path) -> str:
    """Return a digest of a folder's configuration, code and weights, or of one file of weights."""
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    files = [file for file in files if file.is_file()]
    texts = [file for file in files if _is_text(file.name)]
    weights = [file for file in files if file not in texts and file.suffix in WEIGHT_SUFFIXES]
    if not texts and not weights:
        weights = [] if place.is_dir() else files
    digest = hashlib.blake2b(digest_size=16)

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little") + part)

    for file in texts:
        add(os.fsencode(file.name))
        with file.open("rb") as text:
            add(text.read(TEXT_BYTES_MAX))
    sizes = [file.stat().st_size for file in weights]
    spacing = max(BLOCK_BYTES, -(-sum(sizes) // SAMPLES))
    for file, size in zip(weights, sizes, strict=True):
        # The name of a single file is not part of its content: it may differ between hosts.
        add(os.fsencode(file.name) if place.is_dir() else b"")
        add(size.to_bytes(8, "little"))
        for block in _samples(file, size, spacing):
            add(block)
    return digest.hexdigest()


def _is_text(name: str) -> bool:
    return Path(name).suffix in TEXT_SUFFIXES and name not in HARMLESS


def _samples(file: Path, size: int, spacing: int) -> Iterator[bytes]:
    """Yield the first block of a file, blocks in even distances, and the last one."""
    with file.open("rb", buffering=0) as opened:
        for begin in (*range(0, size, spacing), max(size - BLOCK_BYTES, 0)):
            opened.seek(begin)
            yield opened.read(BLOCK_BYTES)


def _snapshot(repository: str, revision: str | None, cache: str | None) -> Path | None:
    """Return the folder of a repository in Hugging Face's cache, None if it is not cached."""
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - SGLang's, not ours
    except ImportError:
        return None
    for name in CONFIGURATIONS:
        try:
            file = try_to_load_from_cache(repository, name, cache_dir=cache, revision=revision)
        except ValueError:  # not the name of a repository
            return None
        if isinstance(file, str):
            return Path(file).parent
    return None
