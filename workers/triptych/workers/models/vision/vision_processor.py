# transformers leaves processors untyped; only this module calls them.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Image processors of model families: pixel values, and the tokens that stand for an image."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from PIL import Image as Pillow
from torch import Tensor
from transformers import AutoImageProcessor, AutoProcessor, Idefics3Processor

from triptych.core.errors import ModelError
from triptych.core.images import NO_GRID, Fixed, Image, ImageLayout, Resizing, Rows, Tiling
from triptych.workers.models.facts import describe
from triptych.workers.models.pretrained import read_config, read_tokenizer, readable
from triptych.workers.models.vision.vision_traits import VisionTraits

TOLD = ("rows", "cols", "num_crops")
"""What a processor tells about split images; towers do not read it."""
PROBES = ((48, 64), (200, 90), (100, 100), (640, 480), (333, 1000), (20, 700), (1000, 37))
"""Widths and heights of images that are processed to see what stands for them."""
FEATURE_ITEM_BYTES = 4
NOTHING_ADDED = {"add_special_tokens": False}
LOCAL = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class VisionProcessor(ABC):
    """A model's processor of images."""

    two_way: ClassVar[bool] = False
    """Whether the tokens of an image attend to all of it."""

    image_processor: Any
    """Of transformers."""
    options: Mapping[str, object] = field(default_factory=dict[str, object], kw_only=True)
    """What it is called with."""

    def pixel_values(self, images: Sequence[Image]) -> Mapping[str, Tensor]:
        """Inputs of the vision tower: resized and normalised, as the model's files say."""
        given = [
            Pillow.frombuffer("RGB", (one.width, one.height), one.rgb, "raw", "RGB", 0, 1)
            for one in images
        ]
        found = self._processed(given)
        return {name: value for name, value in found.items() if name not in TOLD}

    def _processed(self, images: Sequence[Pillow.Image]) -> Mapping[str, Tensor]:
        made = self.image_processor(images=list(images), return_tensors="pt", **self.options)
        return cast("Mapping[str, Tensor]", dict(made))

    @property
    def texts(self) -> tuple[str, str]:
        """``ImageLayout.written`` and ``read_as``."""
        return "", ""

    @property
    @abstractmethod
    def rule(self) -> Fixed | Tiling | Resizing | Rows:
        """Which tokens stand for an image of some size, as the server computes it."""

    @abstractmethod
    def tokens_of(self, image: Pillow.Image) -> Sequence[int]:
        """Which tokens transformers puts into a prompt for an image."""


@dataclass(frozen=True)
class TextAndImages(VisionProcessor):
    """transformers' processor as a whole: LLaVA, Idefics3, and SmolVLM without videos."""

    whole: Any

    @property
    def rule(self) -> Fixed | Tiling:
        made = self.image_processor
        if not getattr(made, "do_image_splitting", False):
            return Fixed(tokens=tuple(self.tokens_of(_blank(PROBES[0]))))
        longest, tile = made.size["longest_edge"], made.max_image_size["longest_edge"]
        tiling = Tiling(longest_edge=int(longest), tile=int(tile))
        patterns = {
            f"{rows}x{columns}": self._tiled(rows, columns) for rows, columns in tiling.grids
        }
        return replace(tiling, patterns=patterns)

    def tokens_of(self, image: Pillow.Image) -> Sequence[int]:
        name: str = self.whole.image_token
        made = self.whole(text=[name], images=[image], text_kwargs=NOTHING_ADDED)
        return list(made["input_ids"][0])

    def _tiled(self, rows: int, columns: int) -> tuple[int, ...]:
        text = self.whole.replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)
        return tuple(self.whole.tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class GemmaImages(VisionProcessor):
    """Gemma 3: the template writes the token before an image, and the processor the rest."""

    whole: Any
    two_way: ClassVar[bool] = True

    @property
    def texts(self) -> tuple[str, str]:
        names = self.whole.tokenizer
        return names.boi_token, f"\n\n{names.boi_token}{names.image_token}{names.eoi_token}\n\n"

    @property
    def rule(self) -> Fixed:
        placeholder = int(self.whole.tokenizer.image_token_id)
        return Fixed(tokens=(placeholder,) * int(self.whole.image_seq_length))

    def tokens_of(self, image: Pillow.Image) -> Sequence[int]:
        written, read_as = self.texts
        names = self.whole.tokenizer
        made = self.whole(text=[written], images=[image], text_kwargs=NOTHING_ADDED)["input_ids"][0]
        count = list(made).count(names.image_token_id)
        text = read_as.replace(names.image_token, names.image_token * count)
        if list(made) != names(text, **NOTHING_ADDED)["input_ids"]:
            raise ModelError(f"an image is {list(made)[:8]}.. in prompts, not {read_as!r}")
        return (names.image_token_id,) * count


@dataclass(frozen=True)
class ImagesAlone(VisionProcessor):
    """The image processor of a family whose whole processor needs packages that read videos."""

    placeholder: int


class QwenImages(ImagesAlone):
    """Qwen2-VL and Qwen2.5-VL."""

    @property
    def rule(self) -> Resizing:
        made = self.image_processor
        return Resizing(
            unit=int(made.patch_size * made.merge_size),
            least_pixels=int(made.size["shortest_edge"]),
            most_pixels=int(made.size["longest_edge"]),
        )

    def tokens_of(self, image: Pillow.Image) -> Sequence[int]:
        patches = int(self._processed([image])["image_grid_thw"].prod())
        return [self.placeholder] * (patches // self.image_processor.merge_size**2)


@dataclass(frozen=True)
class PixtralImages(ImagesAlone):
    """Mistral 3."""

    rows: Rows

    @property
    def rule(self) -> Rows:
        return self.rows

    def tokens_of(self, image: Pillow.Image) -> Sequence[int]:
        height, width = self._processed([image])["image_sizes"][0]
        grid = int(height) // self.rows.unit, int(width) // self.rows.unit
        return self.rows.tokens_of(self.placeholder, grid)


def _read_whole(path: Path) -> VisionProcessor:
    whole: Any = AutoProcessor.from_pretrained(path, **LOCAL)
    return TextAndImages(getattr(whole, "image_processor", None), whole)


def _read_gemma(path: Path) -> VisionProcessor:
    whole: Any = AutoProcessor.from_pretrained(path, **LOCAL)
    if whole.image_processor.do_pan_and_scan:
        raise ModelError(f"{path}: do_pan_and_scan: crops of images are not read")
    return GemmaImages(whole.image_processor, whole)


def _read_smolvlm(path: Path) -> VisionProcessor:
    """Idefics3's processor does the same with images as SmolVLM's, which needs more packages."""
    settings, _ = Idefics3Processor.get_processor_dict(path, **LOCAL)
    images = AutoImageProcessor.from_pretrained(path, **LOCAL)
    count = int(settings["image_seq_len"])
    whole = Idefics3Processor(images, read_tokenizer(path), image_seq_len=count)
    return TextAndImages(images, whole)


def _read_qwen(path: Path) -> VisionProcessor:
    images = AutoImageProcessor.from_pretrained(path, **LOCAL)
    return QwenImages(images, int(read_config(path).image_token_id))


def _read_pixtral(path: Path) -> VisionProcessor:
    config, tokenizer = read_config(path), read_tokenizer(path)
    images = AutoImageProcessor.from_pretrained(path, **LOCAL)
    rows = Rows(
        unit=int(config.vision_config.patch_size * config.spatial_merge_size),
        longest_edge=int(images.size["longest_edge"]),
        row_end=cast("int", tokenizer.convert_tokens_to_ids("[IMG_BREAK]")),
        image_end=cast("int", tokenizer.convert_tokens_to_ids("[IMG_END]")),
    )
    options = {"patch_size": rows.unit}
    return PixtralImages(images, int(config.image_token_id), rows, options=options)


FAMILIES: Mapping[str, Callable[[Path], VisionProcessor]] = {
    "llava": _read_whole,
    "gemma3": _read_gemma,
    "idefics3": _read_whole,
    "smolvlm": _read_smolvlm,
    "qwen2_vl": _read_qwen,
    "qwen2_5_vl": _read_qwen,
    "mistral3": _read_pixtral,
}
"""Model types whose images are read."""


def read_processor(path: Path) -> VisionProcessor:
    """The processor of a model of one of ``FAMILIES``. Raises: ModelError"""
    with readable(path, "no usable processor of images"):
        processor = FAMILIES[read_config(path).model_type](path)
    if processor.image_processor is None:
        raise ModelError(f"{path}: no preprocessor_config.json or processor_config.json")
    return processor


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
        processor = read_processor(path)
        with readable(path, "its processor fails"):
            layout = ImageLayout(
                placeholder=int(config.image_token_id),
                feature_bytes=channels * FEATURE_ITEM_BYTES,
                rule=processor.rule,
                written=processor.texts[0],
                read_as=processor.texts[1],
            )
            is_right = all(
                layout.pattern(*size) == tuple(processor.tokens_of(_blank(size))) for size in PROBES
            )
    except ModelError as error:
        return VisionTraits(reason=f"this model's images cannot be processed: {error}")
    if not is_right or not layout.features(*PROBES[0]):
        return VisionTraits(reason=f"images of this model have other tokens than {kind} models")
    has_grid = layout.rule.rotary_grid(*PROBES[0]) != NO_GRID
    if has_grid and describe(path).plain is None:
        return VisionTraits(reason="images of this model need layers that run fused")
    window = min((one.window for one in describe(path).layers if one.window), default=0)
    if processor.two_way and 0 < window < layout.features(*PROBES[0]):
        return VisionTraits(reason="images are longer than the window of a layer")
    return VisionTraits(layout=layout, two_way=processor.two_way, channels=channels)


def _blank(size: tuple[int, int]) -> Pillow.Image:
    return Pillow.new("RGB", size)
