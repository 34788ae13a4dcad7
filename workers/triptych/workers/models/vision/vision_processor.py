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
from transformers import AutoImageProcessor, AutoProcessor, Idefics3Processor

from triptych.core.errors import ModelError
from triptych.core.images import WHOLE, Grid, Image, ImageLayout, Resizing, Rows, Tiling
from triptych.workers.models.pretrained import read_config, read_tokenizer, readable
from triptych.workers.models.vision.vision_traits import VisionTraits

QWEN = ("qwen2_vl", "qwen2_5_vl")
FAMILIES = ("llava", "idefics3", "smolvlm", "mistral3", *QWEN)
"""Model types whose images are read. All tokens of theirs attend to those before them alone."""
GRID = ("rows", "cols")
"""What a processor tells about split images; towers do not read it."""
PROBES = ((48, 64), (200, 90), (100, 100), (640, 480), (333, 1000), (20, 700), (1000, 37))
"""Widths and heights of images that are processed to see what stands for them."""
FEATURE_ITEM_BYTES = 4
LOCAL = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class VisionProcessor:
    """A model's processor."""

    processor: Any

    @classmethod
    def read(cls, path: Path) -> "VisionProcessor":
        """Raises: ModelError"""
        with readable(path, "no usable processor of images"):
            processor = _processor(path)
        if getattr(processor, "image_processor", None) is None:
            raise ModelError(f"{path}: no preprocessor_config.json or processor_config.json")
        return cls(processor)

    def pixel_values(self, images: Sequence[Image]) -> Mapping[str, Tensor]:
        """Inputs of the vision tower: resized and normalised, as the model's files say."""
        given = [
            Pillow.frombuffer("RGB", (one.width, one.height), one.rgb, "raw", "RGB", 0, 1)
            for one in images
        ]
        options = getattr(self.processor, "image_options", {})
        made = self.processor.image_processor(images=given, return_tensors="pt", **options)
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

    @property
    def rule(self) -> Tiling | Resizing | Rows | None:
        """What the size of an image decides; None: nothing."""
        made = self.processor.image_processor
        if isinstance(self.processor, _QwenImages):
            return Resizing(
                unit=int(made.patch_size * made.merge_size),
                least_pixels=int(made.size["shortest_edge"]),
                most_pixels=int(made.size["longest_edge"]),
            )
        if isinstance(self.processor, _PixtralImages):
            return self.processor.rows
        if not getattr(made, "do_image_splitting", False):
            return None
        longest, tile = made.size["longest_edge"], made.max_image_size["longest_edge"]
        return Tiling(longest_edge=int(longest), tile=int(tile))

    def tokens_of_grid(self, rows: int, columns: int) -> list[int]:
        """The tokens that stand for an image of so many tiles."""
        text = self.processor.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)
        return list(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class _QwenImages:
    """The part of Qwen2-VL's processor that is about images."""

    image_processor: Any
    image_token_id: int

    image_token = ""

    def __call__(self, *, images: Sequence[Pillow.Image], **_: object) -> Mapping[str, Any]:
        """As transformers' processor does with a prompt of one image."""
        made = self.image_processor(images=list(images), return_tensors="pt")
        count = int(made["image_grid_thw"].prod()) // self.image_processor.merge_size**2
        return {"input_ids": [[self.image_token_id] * count]}


@dataclass(frozen=True)
class _PixtralImages:
    """The part of Pixtral's processor that is about images."""

    image_processor: Any
    image_token_id: int
    rows: Rows

    image_token = ""

    @property
    def image_options(self) -> Mapping[str, object]:
        return {"patch_size": self.rows.unit}

    def __call__(self, *, images: Sequence[Pillow.Image], **_: object) -> Mapping[str, Any]:
        """As transformers' processor does with a prompt of one image."""
        made = self.image_processor(images=list(images), **self.image_options)
        height, width = made["image_sizes"][0]
        grid = int(height) // self.rows.unit, int(width) // self.rows.unit
        return {"input_ids": [self.rows.pattern(self.image_token_id, grid)]}


def _processor(path: Path) -> Any:
    """A model's processor; for some families without parts that need more packages."""
    config = read_config(path)
    if config.model_type == "mistral3":
        images, tokenizer = AutoImageProcessor.from_pretrained(path, **LOCAL), read_tokenizer(path)
        rows = Rows(
            unit=int(config.vision_config.patch_size * config.spatial_merge_size),
            longest_edge=int(images.size["longest_edge"]),
            row_end=cast("int", tokenizer.convert_tokens_to_ids("[IMG_BREAK]")),
            image_end=cast("int", tokenizer.convert_tokens_to_ids("[IMG_END]")),
        )
        return _PixtralImages(images, int(config.image_token_id), rows)
    if config.model_type in QWEN:
        images = AutoImageProcessor.from_pretrained(path, **LOCAL)
        return _QwenImages(images, int(config.image_token_id))
    if config.model_type == "smolvlm":
        settings, _ = Idefics3Processor.get_processor_dict(path, **LOCAL)
        return Idefics3Processor(
            AutoImageProcessor.from_pretrained(path, **LOCAL),
            read_tokenizer(path),
            image_seq_len=int(settings["image_seq_len"]),
        )
    return AutoProcessor.from_pretrained(path, **LOCAL)


def observe_vision(path: Path) -> VisionTraits:
    """Process some images, and look at the tokens that stand for them.

    Raises: ModelError for files that cannot be read
    """
    config = read_config(path)
    kind = config.model_type
    if "vision_config" not in config:
        return VisionTraits(reason="this model reads text only")
    if kind not in FAMILIES:
        read = ", ".join(FAMILIES)
        return VisionTraits(reason=f"images of {kind} models are not read yet: only of {read}")
    channels = int(config.get_text_config(decoder=True).hidden_size)
    try:
        processor = VisionProcessor.read(path)
        with readable(path, "its processor fails"):
            layout = _layout(processor, int(config.image_token_id), channels)
            is_right = all(
                layout.pattern(*size) == tuple(processor.tokens_of(*size)) for size in PROBES
            )
    except ModelError as error:
        return VisionTraits(reason=f"this model's images cannot be processed: {error}")
    if not is_right or not layout.features(*PROBES[0]):
        return VisionTraits(reason="images of this model take tokens by another rule than is known")
    return VisionTraits(layout=layout, channels=channels)


def _layout(processor: VisionProcessor, placeholder: int, channels: int) -> ImageLayout:
    rule = processor.rule
    match rule:
        case Tiling():
            patterns = {grid: processor.tokens_of_grid(*grid) for grid in rule.grids}
        case Resizing() | Rows():
            patterns = dict[Grid, list[int]]()
        case None:
            patterns = {WHOLE: processor.tokens_of(*PROBES[0])}
    return ImageLayout(
        placeholder=placeholder,
        feature_bytes=channels * FEATURE_ITEM_BYTES,
        patterns={f"{rows}x{columns}": tuple(one) for (rows, columns), one in patterns.items()},
        rule=rule,
        has_grid_positions=isinstance(rule, Resizing),
    )
