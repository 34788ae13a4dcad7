# pyright: reportUnknownMemberType=false
# safetensors and torch leave some calls untyped.
"""Files of learned networks: safetensors, bound to a model, to coordinates and to a version."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as format_tensors
from torch import Tensor, nn

from triptych.core.errors import ConfigError, ModelError
from triptych.core.images import TEXT, Modality
from triptych.core.layout import Geometry
from triptych.core.methods.learned_files import LearnedFile, NetworkKind
from triptych.core.schema import SchemaError, build
from triptych.workers.compress.learned.chunk_merger import GatedMerger, PaperMerger
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.compress.learned.token_scorer import TokenScorer
from triptych.workers.models.facts import ModelFacts
from triptych.workers.models.store.tensor_headers import read_tensors

VERSION = 1
BASIS = "rope"
"""Coordinates of keys that the networks read: after RoPE, neither rotated nor centred."""
RECORD = "triptych"
Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtefactRecord:
    """Metadata of a file of networks: kind, model, geometry, versions and tensor hash."""

    kind: NetworkKind
    model: str
    """Name of the model, for display."""
    weights: str
    """Hash of the weights that it was trained on."""
    config: str
    """Hash of the config that it was trained on."""
    geometry: Geometry
    hidden: int = 0
    """Units of the hidden layers; 0 where the architecture decides."""
    chunk_tokens: int = 0
    """Tokens that are merged into one; 0 for a scorer."""
    modality: Modality = TEXT
    texts: str = ""
    """Hash of the texts that it was trained on."""
    held_out_loss: float = 0.0
    """Loss on documents of the same texts that it was not trained on."""
    basis: str = BASIS
    version: int = VERSION
    tensors: str = ""
    """SHA-256 of the tensors; set by ``write_artefact``."""


def write_artefact(path: Path, record: ArtefactRecord, network: nn.Module) -> None:
    """Write weights as float16 and buffers as float32, atomically.

    The same network and record give the same bytes.
    """
    tensors = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    trained = {name for name, _ in network.named_parameters()}
    stored = {
        name: tensor.to(torch.float16 if name in trained else torch.float32).contiguous()
        for name, tensor in sorted(tensors.items())
    }
    fields = {**asdict(record), "tensors": _digest(stored)}
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(format_tensors(stored, {RECORD: json.dumps(fields, sort_keys=True)}))
    partial.replace(path)


def read_record(path: Path) -> ArtefactRecord:
    """Read the metadata of a file of networks.

    Raises: ModelError if it is torn or not a file of networks; ConfigError for another version
    """
    read_tensors(path)
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    try:
        data = json.loads(header["__metadata__"][RECORD])
        version = data["version"]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: not a file of learned networks ({error!r})") from error
    if version != VERSION:
        raise ConfigError(
            f"{path}: version {version}, this Triptych reads version {VERSION}: "
            "run 'triptych train' again"
        )
    try:
        return build(ArtefactRecord, data)
    except SchemaError as error:
        raise ModelError(f"{path}: not a file of learned networks ({error})") from error


def read_scorer(path: Path, facts: ModelFacts) -> tuple[TokenScorer, ArtefactRecord]:
    """The scorer of a file, for this model.

    Raises: ModelError if the file is torn; ConfigError if it is of another model, kind or version
    """
    record = _record_for(path, facts, ("scorer",))
    return _scorer(path, record, RopeFrame.of(facts)), record


def read_merger(path: Path, facts: ModelFacts) -> tuple[GatedMerger | PaperMerger, ArtefactRecord]:
    """The merger of a file, for this model.

    Raises: ModelError if the file is torn; ConfigError if it is of another model, kind or version
    """
    record = _record_for(path, facts, ("merger", "paper_merger"))
    return _merger(path, record), record


def read_verified(path: Path, facts: ModelFacts) -> ArtefactRecord:
    """The metadata of a whole file for this model.

    Raises: ModelError if the file is torn; ConfigError if it is of another model or version
    """
    record = _record_for(path, facts, ("scorer", "merger", "paper_merger"))
    _tensors(path, record)
    return record


def load_scorer(file: LearnedFile) -> TokenScorer:
    """The scorer of a file that was checked before. Raises: ModelError if it was replaced since"""
    return _scorer(Path(file.path), _unchanged(file), RopeFrame.of_file(file))


def load_merger(file: LearnedFile) -> GatedMerger | PaperMerger:
    """The merger of a file that was checked before. Raises: ModelError if it was replaced since"""
    return _merger(Path(file.path), _unchanged(file))


def _unchanged(file: LearnedFile) -> ArtefactRecord:
    record = read_record(Path(file.path))
    if (record.kind, record.tensors) != (file.kind, file.tensors):
        raise ModelError(
            f"{file.path}: the file changed since the application started: restart it, or restore "
            "the file"
        )
    return record


def _scorer(path: Path, record: ArtefactRecord, frame: RopeFrame) -> TokenScorer:
    return _filled(TokenScorer(record.geometry, frame, record.hidden), path, record)


def _merger(path: Path, record: ArtefactRecord) -> GatedMerger | PaperMerger:
    if record.kind == "merger":
        gated = GatedMerger(record.geometry, record.chunk_tokens, record.hidden)
        return _filled(gated, path, record)
    return _filled(PaperMerger(record.geometry, record.chunk_tokens), path, record)


def _record_for(path: Path, facts: ModelFacts, kinds: tuple[NetworkKind, ...]) -> ArtefactRecord:
    record = read_record(path)
    if record.kind not in kinds:
        raise ConfigError(f"{path}: holds a {record.kind}, expected a {' or a '.join(kinds)}")
    if record.basis != BASIS:
        raise ConfigError(f"{path}: keys in coordinates {record.basis!r}, expected {BASIS!r}")
    made_for = record.weights, record.config, record.geometry
    if made_for != (facts.weights, facts.config, facts.geometry):
        raise ConfigError(
            f"{path}: trained for {record.model} (weights {record.weights}, config "
            f"{record.config}, {record.geometry}), but the model has weights {facts.weights}, "
            f"config {facts.config}, {facts.geometry}; run 'triptych train' for it"
        )
    return record


def _filled(network: Network, path: Path, record: ArtefactRecord) -> Network:
    """The network with the tensors of a file, as float32 without gradients."""
    tensors = _tensors(path, record)
    try:
        network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise ModelError(f"{path}: tensors of another architecture ({error})") from error
    return network.eval().requires_grad_(False)


def _tensors(path: Path, record: ArtefactRecord) -> dict[str, Tensor]:
    tensors = parse_tensors(path.read_bytes())
    if _digest(tensors) != record.tensors:
        raise ModelError(f"{path}: its tensors do not have the hash of its record: it is torn")
    return tensors


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
