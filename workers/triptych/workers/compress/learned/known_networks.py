"""Finds the learned networks for a model: files that the settings name, or packaged ones."""

from collections.abc import Iterator
from pathlib import Path

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.methods.learned_files import LearnedFile
from triptych.workers.compress.learned.artefact import read_record, read_verified
from triptych.workers.compress.learned.rope_frame import frequencies_of
from triptych.workers.models.facts import ModelFacts

PACKAGED = Path(__file__).parent / "packaged"
"""Files per known model, named by the hash of its weights and their kind."""
AUTO = "auto"


def find_networks(config: AppConfig, facts: ModelFacts) -> tuple[LearnedFile, ...]:
    """The files that the settings name, each checked as a whole, at most one of each kind and
    modality.

    Raises: ConfigError for a file of another model, kind or version, or one that is not there;
            ModelError for a torn one, or a model whose RoPE is not known
    """
    found = list[LearnedFile]()
    names = config.compressor.learned
    for path in [Path(name) for name in names if name != AUTO]:
        if not path.is_file():
            raise ConfigError(f"compressor.learned={str(path)!r}: there is no such file")
        file = _described(path, facts)
        twice = next((one for one in found if _does_the_same(one, file)), None)
        if twice is not None:
            raise ConfigError(
                f"compressor.learned: {twice.path!r} and {file.path!r} are both a {file.kind} of "
                f"modality {file.modality!r}; name one"
            )
        found.append(file)
    if AUTO in names:
        others = [
            one for one in _packaged(facts) if not any(_does_the_same(one, file) for file in found)
        ]
        found += others
    return tuple(found)


def _does_the_same(one: LearnedFile, other: LearnedFile) -> bool:
    return (one.kind, one.modality) == (other.kind, other.modality)


def _packaged(facts: ModelFacts) -> Iterator[LearnedFile]:
    for path in sorted(PACKAGED.glob(f"{facts.weights}.*.safetensors")):
        if read_record(path).config == facts.config:
            yield _described(path, facts)


def _described(path: Path, facts: ModelFacts) -> LearnedFile:
    record = read_verified(path, facts)
    return LearnedFile(
        path=str(path.absolute()),
        kind=record.kind,
        modality=record.modality,
        tensors=record.tensors,
        chunk_tokens=record.chunk_tokens,
        frequencies=frequencies_of(facts),
    )
