# transformers leaves processors untyped; only this module calls them.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""transformers' processor of a vision-language model: prompts and pixel values of images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from PIL import Image as Pillow
from torch import Tensor
from transformers import AutoProcessor

from triptych.core.errors import ModelError
from triptych.core.images import Image, ImageLayout
from triptych.workers.models.pretrained import read_config, readable
from triptych.workers.models.vision.vision_traits import VisionTraits

FAMILIES = ("llava", "idefics3")
"""Model types whose images are read. Each image stands for a fixed number of tokens there (of
Idefics3 if its processor does not split images), and all tokens attend to those before them alone.
"""
GRID = ("rows", "cols")
"""What a processor tells about split images; towers do not read it."""
PROBES = ((48, 64), (200, 90))
"""Sizes of images that are processed to see what stands for them."""
FEATURE_ITEM_BYTES = 4


@dataclass(frozen=True)
class VisionProcessor:
    """A model's processor."""

    processor: Any

    @classmethod
    def read(cls, path: Path) -> "VisionProcessor":
        """Raises: ModelError"""
        with readable(path, "no usable processor of images"):
            options = {"local_files_only": True, "trust_remote_code": False}
            processor = AutoProcessor.from_pretrained(path, **options)
        if getattr(processor, "image_processor", None) is None:
            raise ModelError(f"{path}: no preprocessor_config.json or processor_config.json")
        return cls(processor)

    def pixel_values(self, images: Sequence[Image]) -> Mapping[str, Tensor]:
        """Inputs of the vision tower: resized and normalised, as the model's files say."""
        given = [
            Pillow.frombuffer("RGB", (one.width, one.height), one.rgb, "raw", "RGB", 0, 1)
            for one in images
        ]
        made = self.processor.image_processor(images=given, return_tensors="pt")
        found = cast("Mapping[str, Tensor]", dict(made))
        return {name: value for name, value in found.items() if name not in GRID}

    def tokens_of(self, width: int, height: int) -> list[int]:
        """The tokens that stand for an image of some size."""
        image = Pillow.new("RGB", (width, height))
        name: str = self.processor.image_token
        made = self.processor(
            text=[name], images=[image], text_kwargs={"add_special_tokens": False}
        )
        return list(made["input_ids"][0])


def observe_vision(path: Path) -> VisionTraits:
    """Process some images, and look at the tokens that stand for them.

    Raises: ModelError for files that cannot be read
    """
    config = read_config(path)
    kind = config.model_type
    if "vision_config" not in config:
        return VisionTraits(reason="this model reads text only")
    if kind not in FAMILIES:
        read = " and ".join(FAMILIES)
        return VisionTraits(reason=f"images of {kind} models are not read yet: only of {read}")
    try:
        processor = VisionProcessor.read(path)
        with readable(path, "its processor fails"):
            seen = [processor.tokens_of(*size) for size in PROBES]
    except ModelError as error:
        return VisionTraits(reason=f"this model's images cannot be processed: {error}")
    placeholder, tokens = int(config.image_token_id), seen[0]
    count = tokens.count(placeholder)
    start = tokens.index(placeholder) if count else 0
    is_run = tokens[start : start + count] == [placeholder] * count
    if not count or not is_run or any(other != tokens for other in seen):
        return VisionTraits(reason="images of this model take tokens by their size")
    channels = int(config.get_text_config(decoder=True).hidden_size)
    layout = ImageLayout(
        placeholder=placeholder,
        before=tuple(tokens[:start]),
        tokens=count,
        after=tuple(tokens[start + count :]),
        feature_bytes=count * channels * FEATURE_ITEM_BYTES,
    )
    return VisionTraits(layout=layout, channels=channels)
