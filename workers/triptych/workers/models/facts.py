"""Facts of a model: geometry, layers, context length, end tokens and hashes, without weights."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from triptych.core.errors import ModelError
from triptych.core.schema import build
from triptych.workers.models.store.checkpoint_files import check_checkpoint
from triptych.workers.models.store.file_digests import digest_of
from triptych.workers.models.store.metadata_cache import (
    DESCRIBING_FILES,
    cached,
    hash_files,
    reader_versions,
)
from triptych.workers.models.store.safe_files import Progress, ignore_progress
from triptych.workers.models.traits import HEAD, ModelShape, ModelTraits

_SETTINGS = ("config.json", "generation_config.json")
_COSMETIC = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version",
             "use_cache"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts(ModelTraits):
    """Traits of a model, and the hashes of its files that cache keys contain."""

    revision: str
    """Hash of config, tokenizer and weights: part of all cache keys."""
    weights: str
    """Hash of the weights alone."""
    config: str
    """Hash of the config alone: a profile belongs to the weights and to it."""


def describe(path: Path) -> ModelFacts:
    """Read a model's facts without its weights.

    The geometry is observed, not derived from the config: one token runs through the model on
    torch's ``meta`` device. The result is cached on disk, so only the first process on a machine
    imports transformers for it.

    Raises: ModelError for what cannot be served, saying why
    """
    traits = cached("facts", path, _SETTINGS, lambda: _as_text(path), _parse)
    known = {field.name: getattr(traits, field.name) for field in fields(ModelTraits)}
    check_checkpoint(path, _stored_shapes(traits))
    weights = weights_of(path)
    if traits.plain is None:
        cached(f"weights/{weights}", path, _SETTINGS, lambda: _checked_weights(path), str)
    return ModelFacts(
        **known, revision=revision_of(path, weights), weights=weights, config=config_of(path)
    )


def _stored_shapes(traits: ModelTraits) -> dict[str, tuple[int, ...]] | None:
    """Weights that the files must hold; None if transformers converts their names."""
    if traits.plain is None:
        return None
    head = {HEAD} if traits.plain.is_tied else set[str]()
    return {name: shape for name, shape in traits.plain.tensors.items() if name not in head}


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


def _checked_weights(path: Path) -> str:
    from triptych.workers.models.architecture.weight_files import (  # noqa: PLC0415
        check_weights,
    )

    check_weights(path)
    return "complete"


def _parse(text: str) -> ModelTraits:
    return build(ModelTraits, json.loads(text))


def revision_of(path: Path, weights: str) -> str:
    """Hash of all that decides what a model computes: settings, tokenizer, weights, and the
    versions of the libraries that read them."""
    parts = (reader_versions(), hash_files(path, DESCRIBING_FILES), weights)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def weights_of(path: Path, progress: Progress = ignore_progress) -> str:
    """Hash of every byte of the weights; ``file_digests`` caches that of a file.

    A manifest is not trusted: it may have been copied along with other weights.

    Raises: ModelError if a file cannot be read
    """
    digest = hashlib.sha256()
    try:
        for file in sorted(path.glob("*.safetensors")):
            digest.update(f"{file.name}:{file.stat().st_size}".encode())
            digest.update(digest_of(file, progress).encode())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    return digest.hexdigest()[:16]


def config_of(path: Path) -> str:
    """Hash of ``config.json`` without the keys that change no computation.

    Raises: ModelError if it is not a JSON object
    """
    try:
        found = json.loads((path / "config.json").read_text(encoding="utf-8"))
        items = sorted(dict(found).items())
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path}: no usable config: {error}") from error
    kept = [item for item in items if item[0] not in _COSMETIC and item[1] is not None]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
