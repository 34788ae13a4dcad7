"""How a model reads images: what stands for one in a prompt, without weights."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from triptych.core.images import ImageLayout
from triptych.core.schema import build
from triptych.workers.models.store.metadata_cache import DESCRIBING_FILES, cached


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTraits:
    """Whether a model reads images, and how."""

    layout: ImageLayout | None = None
    """What stands in a prompt for an image; None: images of this model are not read."""
    two_way: bool = False
    """Whether the tokens of an image attend to all of it, and not only to those before them."""
    channels: int = 0
    """Size of a feature: that of the model's embeddings."""
    reason: str = ""
    """Why images are not read."""


def describe_vision(path: Path) -> VisionTraits:
    """Read how a model reads images; cached on disk, as ``describe`` does.

    Raises: ModelError if its files cannot be read
    """
    return cached("vision", path, DESCRIBING_FILES, lambda: _as_text(path), _parse)


def _as_text(path: Path) -> str:
    from triptych.workers.models.vision.vision_processor import (  # noqa: PLC0415 - takes seconds
        observe_vision,
    )

    return json.dumps(asdict(observe_vision(path)))


def _parse(text: str) -> VisionTraits:
    return build(VisionTraits, json.loads(text))
