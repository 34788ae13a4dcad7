"""A tiny random LLaVA with the byte tokenizer, as a directory in Hugging Face's form."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    Idefics3VisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
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
    tokenizer = byte_tokenizer()
    special = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    config = Idefics3Config(
        vision_config=Idefics3VisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=56,
            patch_size=7,
            initializer_range=0.2,
        ),
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
            do_image_splitting=False,
            size={"longest_edge": 56},
            max_image_size={"longest_edge": 56},
        ),
        tokenizer=tokenizer,
        image_seq_len=IMAGE_TOKENS,
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    return path


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
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
    )


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
        self.processor = AutoProcessor.from_pretrained(path)

    def prompt(self, text: str, images: Sequence[Image.Image]) -> list[int]:
        """Token ids with one ``<image>`` for each image, and with as many as it has features."""
        given = self._inputs(text, images)["input_ids"]
        return given[0].tolist()

    def tokens(self, text: str, images: Sequence[Image.Image], count: int) -> list[int]:
        """Greedy output tokens."""
        given = self._inputs(text, images)
        with torch.inference_mode():
            out = self.model.generate(
                **given, max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        return out[0][given["input_ids"].shape[1] :].tolist()

    def chat(self, messages: Sequence[dict[str, object]], images: Sequence[Image.Image]) -> str:
        """The prompt of a chat, as transformers renders it."""
        return self.processor.apply_chat_template(list(messages), add_generation_prompt=True)

    def _inputs(self, text: str, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        return self.processor(
            text=[text],
            images=list(images) or None,
            return_tensors="pt",
            text_kwargs={"add_special_tokens": False},
        )
