"""Tiny random models that read images, as directories in Hugging Face's form."""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma3TextConfig,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    Idefics3VisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
    SmolVLMVisionConfig,
)

from tests.tiny import CONTEXT_TOKENS, byte_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
IMAGE_TOKENS = 16
"""Of an image that is not split, and of a tile."""
NEAR_TIE = 0.003
"""Difference of two logits that may change sides in pages of 16 bits."""
TILE = 56
TILE_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": 7,
    "initializer_range": 0.2,
}
"""Settings of a vision tower of which 2 x 2 patches make a token."""


def save_tiny_vision_model(path: Path) -> Path:
    """A vision tower of three layers, and the language model of ``save_tiny_model``."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=28,
        patch_size=7,
        projection_dim=32,
        initializer_range=0.2,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=_text_config(len(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=False,
    )
    torch.manual_seed(7)
    LlavaForConditionalGeneration(config).save_pretrained(path)
    side = {"height": vision.image_size, "width": vision.image_size}
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=side),
        tokenizer=tokenizer,
        patch_size=vision.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    return path


def save_tiny_idefics3(path: Path) -> Path:
    """Idefics3 whose images are not split: 56 x 56 pixels, and 2 x 2 patches make a token."""
    return _save_idefics3(path, TILE, is_split=False)


def save_tiny_idefics3_with_tiles(path: Path) -> Path:
    """Idefics3 with up to four tiles of 56 x 56 pixels, and the whole image."""
    return _save_idefics3(path, 2 * TILE, is_split=True)


def _save_idefics3(path: Path, longest: int, *, is_split: bool) -> Path:
    tokenizer = _tokenizer_of_tiles()
    config = Idefics3Config(
        vision_config=Idefics3VisionConfig(**TILE_TOWER),
        text_config=_text_config(len(tokenizer)).to_dict(),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(8)
    Idefics3ForConditionalGeneration(config).save_pretrained(path)
    Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            do_image_splitting=is_split,
            size={"longest_edge": longest},
            max_image_size={"longest_edge": TILE},
        ),
        tokenizer=tokenizer,
        image_seq_len=IMAGE_TOKENS,
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    return path


def save_tiny_smolvlm(path: Path) -> Path:
    """SmolVLM with up to four tiles, and the files that a published one has."""
    tokenizer = _tokenizer_of_tiles()
    config = SmolVLMConfig(
        vision_config=SmolVLMVisionConfig(**TILE_TOWER),
        text_config=_text_config(len(tokenizer)).to_dict(),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(9)
    SmolVLMForConditionalGeneration(config).save_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    SmolVLMImageProcessorPil(
        size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}
    ).save_pretrained(path)
    known = {"image_seq_len": IMAGE_TOKENS, "processor_class": "SmolVLMProcessor"}
    (path / "processor_config.json").write_text(json.dumps(known))
    return path


def save_tiny_qwen2_vl(path: Path) -> Path:
    """Qwen2.5-VL: 14 x 14 pixels make a token, and positions of images count rows and columns."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = _text_config(len(tokenizer)).to_dict() | {"model_type": "qwen2_5_vl_text"}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [6, 5, 5],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 7,
            "spatial_merge_size": 2,
            "out_hidden_size": text["hidden_size"],
            "window_size": 28,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.2,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    torch.manual_seed(10)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(path)
    # transformers' positions of two images without a token between them are those of one.
    tokenizer.chat_template = TEMPLATE.replace("<image>", "[<image>]")
    tokenizer.save_pretrained(path)
    size = {"shortest_edge": 28 * 28, "longest_edge": 70 * 70}
    Qwen2VLImageProcessorPil(size=size, patch_size=7, merge_size=2).save_pretrained(path)
    return path


def save_tiny_mistral3(path: Path) -> Path:
    """Mistral 3 with Pixtral's tower: 14 x 14 pixels make a token, and each row ends with one."""
    tokenizer = byte_tokenizer()
    special = ["<image>", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    text = _text_config(len(tokenizer)).to_dict() | {"model_type": "mistral"}
    config = Mistral3Config(
        text_config=text,
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": 84,
            "patch_size": 7,
            "initializer_range": 0.2,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(11)
    Mistral3ForConditionalGeneration(config).save_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    PixtralImageProcessorPil(
        size={"longest_edge": 84}, patch_size={"height": 7, "width": 7}
    ).save_pretrained(path)
    return path


def save_tiny_gemma3(path: Path) -> Path:
    """Gemma 3: tokens of an image attend to all of it, and every second layer has a window."""
    tokenizer = byte_tokenizer()
    special = {"boi_token": "<soi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    tokenizer.add_special_tokens({"additional_special_tokens": list(special.values())})
    tokenizer._set_model_specific_special_tokens(special)
    tokenizer.chat_template = TEMPLATE.replace("<image>", "<soi>")
    config = Gemma3Config(
        text_config=Gemma3TextConfig(
            **_text_config(len(tokenizer)).to_dict()
            | {"model_type": "gemma3_text", "sliding_window": 24, "sliding_window_pattern": 2}
        ),
        vision_config=SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=56,
            patch_size=7,
            vision_use_head=False,
        ),
        mm_tokens_per_image=IMAGE_TOKENS,
        boi_token_index=tokenizer.convert_tokens_to_ids("<soi>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<eoi>"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    torch.manual_seed(14)
    Gemma3ForConditionalGeneration(config).save_pretrained(path)
    Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=IMAGE_TOKENS,
    ).save_pretrained(path)
    return path


@dataclass(frozen=True)
class _ImagesAlone:
    """What a family's processor does with images, without the packages that it needs for videos."""

    image_processor: Any
    tokenizer: PreTrainedTokenizerFast
    options: ClassVar[dict[str, int]] = {}

    def patterns(self, pixels: dict[str, torch.Tensor]) -> list[str]:
        """The text that stands for each image, with ``<one>`` for a feature."""
        raise NotImplementedError

    def __call__(
        self, *, text: Sequence[str], images: Sequence[Image.Image] | None, **_: object
    ) -> dict[str, torch.Tensor]:
        (prompt,), pixels = text, dict[str, torch.Tensor]()
        if images:
            made = self.image_processor(images=list(images), return_tensors="pt", **self.options)
            pixels = {name: torch.as_tensor(value) for name, value in made.items()}
            for pattern in self.patterns(pixels):
                prompt = prompt.replace("<image>", pattern, 1)
            prompt = prompt.replace("<one>", "<image>")
        found = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        return {"input_ids": found["input_ids"], **pixels}


class _PixtralProcessor(_ImagesAlone):
    options: ClassVar[dict[str, int]] = {"patch_size": 14}

    def patterns(self, pixels: dict[str, torch.Tensor]) -> list[str]:
        sizes = (pixels["image_sizes"] // 14).tolist()
        return ["[IMG_BREAK]".join(["<one>" * wide] * tall) + "[IMG_END]" for tall, wide in sizes]


class _QwenProcessor(_ImagesAlone):
    def patterns(self, pixels: dict[str, torch.Tensor]) -> list[str]:
        return ["<one>" * (int(grid.prod()) // 4) for grid in pixels["image_grid_thw"]]

    def __call__(self, **given: Any) -> dict[str, torch.Tensor]:
        made = super().__call__(**given)
        image = self.tokenizer.convert_tokens_to_ids("<image>")
        return {**made, "mm_token_type_ids": (made["input_ids"] == image).int()}


def _tokenizer_of_tiles() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    labels = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, *labels]})
    return tokenizer


def _text_config(vocab_size: int) -> LlamaConfig:
    """The language model of ``save_tiny_model``."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2 * CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
    )


ALONE = {"qwen2_5_vl": _QwenProcessor, "mistral3": _PixtralProcessor}
"""Processors of families of which transformers' own needs more packages."""


def random_images(count: int, seed: int) -> list[Image.Image]:
    luck = np.random.default_rng(seed)
    sizes = luck.integers(20, 90, (count, 2))
    return [Image.fromarray(luck.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def data_uri(image: Image.Image, kind: str = "PNG") -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


class Reference:
    """transformers' own model and processor."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        if self.model.config.model_type == "smolvlm":
            # SmolVLM's own processor needs packages that read videos.
            self.processor = Idefics3Processor(
                AutoImageProcessor.from_pretrained(path),
                AutoTokenizer.from_pretrained(path),
                image_seq_len=IMAGE_TOKENS,
            )
        elif self.model.config.model_type in ALONE:
            self.processor = ALONE[self.model.config.model_type](
                AutoImageProcessor.from_pretrained(path), AutoTokenizer.from_pretrained(path)
            )
        else:
            self.processor = AutoProcessor.from_pretrained(path)
        self.template = self.processor.tokenizer.chat_template or self.processor.chat_template
        self.texts = "<image>", "<image>"
        """What the processor reads for an image, and what is tokenized in its place."""
        if self.model.config.model_type == "gemma3":
            self.texts = "<soi>", "\n\n<soi><image><eoi>\n\n"

    def ids(self, text: str) -> list[int]:
        """Tokens of a text as a server reads it: one placeholder for each ``<image>``."""
        given = text.replace("<image>", self.texts[1])
        return self.processor.tokenizer(given, add_special_tokens=False)["input_ids"]

    def prompt(self, text: str, images: Sequence[Image.Image]) -> list[int]:
        """Token ids of a text with ``<image>`` for each image: as many as it has features."""
        given = self._inputs(text, images)["input_ids"]
        return given[0].tolist()

    def tokens(self, text: str, images: Sequence[Image.Image], count: int) -> list[int]:
        """Greedy output tokens, up to the first that was nearly another one.

        Pages have 16 bits, so what comes after that token may differ.
        """
        given = self._inputs(text, images)
        with torch.inference_mode():
            # Without an end of text: `min_new_tokens` would keep that token from being chosen.
            how = GenerationConfig(
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            out = self.model.generate(**given, generation_config=how)
        tokens = out.sequences[0][given["input_ids"].shape[1] :].tolist()
        best = torch.stack(out.logits)[:, 0].topk(2).values
        close = (best[:, 0] - best[:, 1] < NEAR_TIE).nonzero()
        return tokens[: int(close[0])] if len(close) else tokens

    def chat(self, messages: Sequence[dict[str, object]], images: Sequence[Image.Image]) -> str:
        """The prompt of a chat, as transformers renders it."""
        given = list(messages)
        return self.processor.tokenizer.apply_chat_template(
            given, tokenize=False, add_generation_prompt=True, chat_template=self.template
        )

    def _inputs(self, text: str, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        return self.processor(
            text=[text.replace("<image>", self.texts[0])],
            images=list(images) or None,
            return_tensors="pt",
            text_kwargs={"add_special_tokens": False},
        )
