"""Files of learned networks for a model, with random weights."""

from pathlib import Path

import torch
from torch import nn

from triptych.core.images import IMAGE, TEXT, Modality
from triptych.core.methods.learned_files import NetworkKind
from triptych.workers.compress.learned.artefact import ArtefactRecord, write_artefact
from triptych.workers.compress.learned.chunk_merger import GatedMerger, PaperMerger
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.compress.learned.token_scorer import TokenScorer
from triptych.workers.models.facts import describe

CHUNK_TOKENS = 3
IMAGE_CHUNK_TOKENS = 4
HIDDEN = 8


def networks_beside(model: Path) -> list[str]:
    """The files that ``save_networks`` wrote."""
    return sorted(map(str, model.parent.glob(f"{model.name}.*.safetensors")))


def save_networks(model: Path) -> list[str]:
    """Files of a compressor of text, one of images, one of the variant ``paper``, and a scorer,
    beside the model."""
    facts = describe(model)
    geometry, frame = facts.geometry, RopeFrame.of(facts)
    networks: list[tuple[NetworkKind, Modality, int, nn.Module]] = [
        ("merger", TEXT, CHUNK_TOKENS, GatedMerger(geometry, CHUNK_TOKENS, HIDDEN)),
        ("merger", IMAGE, IMAGE_CHUNK_TOKENS, GatedMerger(geometry, IMAGE_CHUNK_TOKENS, HIDDEN)),
        ("paper_merger", TEXT, CHUNK_TOKENS, PaperMerger(geometry, CHUNK_TOKENS)),
        ("scorer", TEXT, 0, TokenScorer(geometry, frame, HIDDEN)),
    ]
    paths = list[str]()
    for kind, modality, chunk_tokens, network in networks:
        draw = torch.Generator().manual_seed(3)
        for part in network.parameters():
            part.data += torch.randn(part.shape, generator=draw) * 0.05
        record = ArtefactRecord(
            kind=kind,
            model="tiny",
            weights=facts.weights,
            config=facts.config,
            geometry=geometry,
            hidden=0 if kind == "paper_merger" else HIDDEN,
            chunk_tokens=chunk_tokens,
            modality=modality,
        )
        path = model.with_name(f"{model.name}.{modality}.{kind}.safetensors")
        write_artefact(path, record, network)
        paths.append(str(path))
    return paths
