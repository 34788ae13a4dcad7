"""Models: where they come from, how they are stored, loaded and run."""

from triptych.workers.models.attention import Attend, LayerTraits
from triptych.workers.models.basis import Coordinates
from triptych.workers.models.facts import ModelFacts, ModelShape, describe, shape_of
from triptych.workers.models.load import LoadedModel, load
from triptych.workers.models.runner import ModelRunner, Runner
from triptych.workers.models.store import fetch, resolve

__all__ = [
    "Attend",
    "Coordinates",
    "LayerTraits",
    "LoadedModel",
    "ModelFacts",
    "ModelRunner",
    "ModelShape",
    "Runner",
    "describe",
    "fetch",
    "load",
    "resolve",
    "shape_of",
]
