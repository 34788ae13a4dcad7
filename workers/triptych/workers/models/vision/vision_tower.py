# transformers leaves its models untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The part of a vision-language model that computes features of images."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from triptych.core.config import DType
from triptych.core.errors import ModelError
from triptych.core.images import Image, ImageLayout
from triptych.workers.models.pretrained import no_progress_bar, read_config, readable
from triptych.workers.models.vision.vision_processor import VisionProcessor, read_processor
from triptych.workers.models.vision.vision_traits import describe_vision

TEXT_PARTS = ("language_model", "text_model")
"""Names of a model's layers that read text."""


@dataclass(frozen=True)
class VisionTower:
    """Vision tower and projector, as transformers computes them, and the model's processor."""

    model: Any
    processor: VisionProcessor
    layout: ImageLayout
    channels: int
    device: torch.device

    @classmethod
    def read(cls, path: Path, dtype: DType, device: torch.device) -> "VisionTower":
        """Load what images need of a checkpoint; no layer that reads text.

        Raises: ModelError for what cannot be loaded
        """
        traits = describe_vision(path)
        if traits.layout is None:
            raise ModelError(f"{path}: {traits.reason}")
        return cls(
            _without_text(path, dtype).to(device),
            read_processor(path),
            traits.layout,
            traits.channels,
            device,
        )

    def encode(self, images: Sequence[Image]) -> Sequence[Tensor]:
        """Features of some images, computed together.

        Shapes:  -> (features of the image, channels) float32, on the host, of each image
        Raises:  ModelError if they are more or fewer
        """
        with torch.inference_mode():
            given = self.processor.pixel_values(images)
            dtype = self.model.dtype
            inputs = {
                name: value.to(self.device, dtype if value.is_floating_point() else None)
                for name, value in given.items()
            }
            found = self.model.get_image_features(**inputs).pooler_output
            rows = found if isinstance(found, Tensor) else torch.cat(list(found))
            counts = [self.layout.features(one.width, one.height) for one in images]
            if rows.numel() != sum(counts) * self.channels:
                expected = (sum(counts), self.channels)
                raise ModelError(f"features of shape {tuple(rows.shape)}: expected {expected}")
            flat = rows.reshape(-1, self.channels).float().cpu()
            return cast("Sequence[Tensor]", flat.split(counts))


def _text_part_of(model: nn.Module) -> str:
    """Name of the layers that read text."""
    return next(name for name in TEXT_PARTS if hasattr(model, name))


def _without_text(path: Path, dtype: DType) -> nn.Module:
    """A checkpoint without the layers that read text."""
    config = read_config(path)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    with readable(path, "its vision tower cannot be loaded"), no_progress_bar():
        loaded = AutoModelForImageTextToText.from_pretrained(
            path,
            config=config,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, report = cast("tuple[Any, dict[str, set[str]]]", loaded)
        if missing := sorted(report["missing_keys"]):
            raise ModelError(f"{path}: weights are missing: {missing[:5]}")
        setattr(model.model, _text_part_of(model.model), nn.Identity())
        model.lm_head = nn.Identity()
        return model.eval().requires_grad_(False)
