# pyright: reportUnknownMemberType=false
# safetensors and torch leave some calls untyped.
"""Files of codebooks of keys (A2ATS): safetensors, bound to a model."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as format_tensors
from torch import Tensor

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError, ModelError
from triptych.core.layout import Geometry
from triptych.core.pages import PagePlan
from triptych.core.schema import SchemaError, build
from triptych.kernels.select.key_codes import CENTROIDS, KeyCodebooks
from triptych.workers.models.facts import ModelFacts
from triptych.workers.models.kv_rotation import Coordinates
from triptych.workers.models.store.tensor_headers import read_tensors

VERSION = 1
RECORD = "triptych codebooks"
AGAIN = "run 'triptych codebooks' for this model"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodebookRecord:
    """The model and the texts that codebooks of a file were fitted to."""

    weights: str
    """Hash of the model's weights."""
    geometry: Geometry
    distance: int
    """Tokens from queries to keys (windowed RoPE)."""
    texts: str = ""
    """Hash of the texts."""
    version: int = VERSION
    digest: str = ""
    """SHA-256 of the tensors; set by ``write_codebooks``."""


def write_codebooks(
    path: Path, record: CodebookRecord, centroids: Tensor, moments: Tensor, frequencies: Tensor
) -> None:
    """Write centroids [L, KH, 256, d] as float16, moments [L, KH, d, d] and frequencies [d/2] as
    float32, atomically."""
    stored = {
        "centroids": centroids.half().contiguous(),
        "frequencies": frequencies.float().contiguous(),
        "moments": moments.float().contiguous(),
    }
    fields = asdict(replace(record, digest=_digest(stored)))
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(format_tensors(stored, {RECORD: json.dumps(fields, sort_keys=True)}))
    partial.replace(path)


def check_codebooks(config: AppConfig, facts: ModelFacts) -> None:
    """Check the file that ``decode.selection`` names, if it needs one, before anything runs.

    Raises: ConfigError if it is not there or of another model or version; ModelError if it is torn
    """
    if config.decode.selection.method != "a2ats":
        return
    path = Path(config.decode.selection.codebooks)
    record, _ = _read(path)
    if record.weights != facts.weights or record.geometry != facts.geometry:
        raise ConfigError(
            f"decode.selection.codebooks={path}: it was fitted to another model (weights "
            f"{record.weights[:12]}, this model {facts.weights[:12]}): {AGAIN}"
        )


def load_codebooks(path: Path, plan: PagePlan, device: torch.device) -> KeyCodebooks:
    """The codebooks of a file that was checked before, for the pages of a plan.

    Raises: as ``check_codebooks``
    """
    record, tensors = _read(path)
    if record.geometry != plan.geometry:
        raise ConfigError(f"decode.selection.codebooks={path}: of {record.geometry}: {AGAIN}")
    found = {name: tensor.float().to(device) for name, tensor in tensors.items()}
    geometry = plan.geometry
    rotation = Coordinates.of(plan.policy.kv_rotation, geometry, device)
    shape = geometry.layers, geometry.kv_heads, geometry.head_dim
    return KeyCodebooks(
        centroids=found["centroids"],
        moments=found["moments"],
        frequencies=found["frequencies"],
        distance=record.distance,
        centre=torch.zeros(shape, device=device) if rotation is None else rotation.centre,
    )


def _read(path: Path) -> tuple[CodebookRecord, dict[str, Tensor]]:
    if not path.is_file():
        raise ConfigError(f"decode.selection.codebooks={path}: there is no such file: {AGAIN}")
    read_tensors(path)
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    try:
        record = build(CodebookRecord, json.loads(header["__metadata__"][RECORD]))
    except (KeyError, TypeError, ValueError, SchemaError) as error:
        raise ModelError(f"{path}: not a file of codebooks ({error!r})") from error
    if record.version != VERSION:
        raise ConfigError(f"{path}: version {record.version}, expected {VERSION}: {AGAIN}")
    tensors = parse_tensors(content)
    geometry = record.geometry
    shape = (geometry.layers, geometry.kv_heads, CENTROIDS, geometry.head_dim)
    if _digest(tensors) != record.digest or tensors["centroids"].shape != shape:
        raise ModelError(f"{path}: the file is damaged: {AGAIN}")
    return record, tensors


def _digest(tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode() + tensor.numpy().tobytes())
    return total.hexdigest()
