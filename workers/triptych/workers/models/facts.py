"""Facts of a model: geometry, layers, context length, end tokens and hashes, without weights."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from triptych.core.schema import build
from triptych.workers.models.store.metadata_cache import cached
from triptych.workers.models.store.safe_files import MANIFEST, file_hashes
from triptych.workers.models.traits import ModelShape, ModelTraits

_SAMPLE_BYTES, _SAMPLES = 4096, 64
_SETTINGS = ("config.json", "generation_config.json")
_OBSERVER = str(Path(__file__).with_name("observe.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts(ModelTraits):
    """What the engine needs to know of a model besides its weights."""

    revision: str
    """Hash of config, tokenizer and weights: part of all cache keys."""
    weights: str
    """Hash of the weights alone: a profile belongs to it."""


def describe(path: Path) -> ModelFacts:
    """Read a model's facts without its weights.

    The geometry is observed, not derived from the config: one token runs through the model on
    torch's ``meta`` device. The result is cached on disk, so only the first process on a machine
    imports transformers for it.

    Raises: ModelError for what cannot be served, saying why
    """
    traits = cached("facts", path, _SETTINGS, _OBSERVER, lambda: _as_text(path), _parse)
    known = {field.name: getattr(traits, field.name) for field in fields(ModelTraits)}
    return ModelFacts(**known, revision=revision_of(path), weights=weights_of(path))


def shape_of(path: Path) -> ModelShape:
    """Read a model's shape from its ``config.json`` alone, without weights.

    Raises: ModelError for what cannot be served, saying why
    """
    from triptych.workers.models.observe import observe_shape  # noqa: PLC0415

    return observe_shape(path)


def _as_text(path: Path) -> str:
    from triptych.workers.models.observe import (  # noqa: PLC0415 - takes seconds, rarely needed
        observe,
    )

    return json.dumps(asdict(observe(path)))


def _parse(text: str) -> ModelTraits:
    return build(ModelTraits, json.loads(text))


def revision_of(path: Path) -> str:
    """Hash of settings, tokenizer and weights."""
    if (path / MANIFEST).is_file():
        return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()[:16]
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.json")):
        digest.update(file.name.encode() + file.read_bytes())
    digest.update(weights_of(path).encode())
    return digest.hexdigest()[:16]


def weights_of(path: Path) -> str:
    """Hash of the weights.

    A converted model has a manifest with full hashes. For other weight files the size and 64
    samples of 4 KiB are hashed, header first: fine-tuned weights of the same shape differ in
    nearly every sample.
    """
    digest = hashlib.sha256()
    known = file_hashes(path)
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        if file.name in known:
            digest.update(known[file.name].encode())
            continue
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(sample * size // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
