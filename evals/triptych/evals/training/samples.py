"""Training samples: contexts to compress, and the tokens that follow them.

Texts are cut from Python's documentation and code. Chats with images come from a file: JSON lines
of ``{"messages": [...]}`` in the form of OpenAI's API, whose last message is the assistant's. URLs
of images are data URIs, or files beside it.
"""

import base64
import binascii
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from jinja2 import TemplateError
from PIL import Image as Pillow

from triptych.core.errors import ConfigError, RequestError
from triptych.core.images import (
    Image,
    ImageLayout,
    ImageSpan,
    Segment,
    expand_images,
    image_segments,
)
from triptych.evals.data.texts import Split, documents, text_hash
from triptych.evals.data.vocabulary import Vocabulary
from triptych.workers.models.tokenizer import FastTokenizer, open_tokenizer, with_images
from triptych.workers.models.vision.vision_traits import describe_vision

SPLIT: Split = "calibration"
"""Texts to train on; reports use others."""

JsonObject = Mapping[str, object]
NOT_A_CHAT = (
    *(ValueError, KeyError, TypeError, OSError),
    *(RequestError, TemplateError, Pillow.DecompressionBombError),
)
"""What reading a line can raise."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A text, or a chat with images."""

    tokens: tuple[int, ...]
    context: int
    """First tokens, which are compressed; those of a chat end with its last image."""
    images: tuple[Image, ...] = ()
    spans: tuple[ImageSpan, ...] = ()
    """Places of the images in the context."""

    @property
    def continuation(self) -> tuple[int, ...]:
        return self.tokens[self.context :]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Parts of the context that are no text."""
        return image_segments(self.spans)


@dataclass(frozen=True)
class Samples:
    """Samples to train on, then those that are held out."""

    every: tuple[Sample, ...]
    source: str
    """Hash of the texts, or of the file of chats."""


def text_samples(path: Path, *, context: int, continuation: int, count: int) -> Samples:
    """Documents in the tokens of a model. Raises: ConfigError if the texts are too short"""
    found = documents(
        Vocabulary(path).encode, SPLIT, context=context, continuation=continuation, count=count
    )
    every = tuple(
        Sample(tokens=(*one.context, *one.continuation), context=context) for one in found
    )
    return Samples(every, text_hash(SPLIT))


def chat_samples(path: Path, file: Path, count: int) -> Samples:
    """The first ``count`` chats of a file, in the tokens of a model.

    Raises: ConfigError naming the line that is not such a chat, if there are fewer, or if the model
        reads no images
    """
    traits = describe_vision(path)
    if traits.layout is None:
        raise ConfigError(f"{path}: {traits.reason}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < count:
        raise ConfigError(f"{file}: {len(lines)} chats; {count} are to be trained on and held out")
    tokenizer = with_images(open_tokenizer(path), traits.layout)
    every = list[Sample]()
    for number, line in enumerate(lines[:count], 1):
        try:
            every.append(_chat(line, file.parent, tokenizer, traits.layout))
        except NOT_A_CHAT as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{file}, line {number}: {reason}") from error
    return Samples(tuple(every), hashlib.sha256(text.encode()).hexdigest()[:16])


def _chat(line: str, folder: Path, tokenizer: FastTokenizer, layout: ImageLayout) -> Sample:
    *asked, answer = cast("list[JsonObject]", json.loads(line)["messages"])
    if answer["role"] != "assistant" or not isinstance(answer["content"], str):
        raise ValueError("the last message is not an assistant's text")
    images = [_image(url, folder) for message in asked for url in _urls(message)]
    if not images:
        raise ValueError("there is no image")
    prompt = tokenizer.apply_chat_template(list(map(_turn, asked)), add_generation_prompt=True)
    tokens, spans = expand_images(
        tokenizer.encode(prompt, add_special_tokens=False), images, layout
    )
    tokens += tokenizer.encode(answer["content"], add_special_tokens=False)
    return Sample(tokens=tuple(tokens), context=spans[-1].stop, images=tuple(images), spans=spans)


def _parts(message: JsonObject) -> Sequence[JsonObject]:
    content = message["content"]
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return cast("list[JsonObject]", content)


def _urls(message: JsonObject) -> list[str]:
    found = (part["image_url"] for part in _parts(message) if part["type"] == "image_url")
    return [str(cast("JsonObject", one)["url"]) for one in found]


def _turn(message: JsonObject) -> JsonObject:
    """A message as chat templates read it."""
    parts = [{"type": "image"} if part["type"] == "image_url" else part for part in _parts(message)]
    if all(part["type"] == "text" for part in parts):
        return {"role": message["role"], "content": "\n".join(str(part["text"]) for part in parts)}
    return {"role": message["role"], "content": parts}


def _image(url: str, folder: Path) -> Image:
    if url.startswith("data:"):
        try:
            data = base64.b64decode(url.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise ValueError(f"a data URI that is not base64: {error}") from error
    elif urlsplit(url).scheme:
        raise ValueError(f"{url[:80]!r} is neither a data URI nor a file")
    else:
        data = (folder / url).read_bytes()
    with Pillow.open(io.BytesIO(data)) as opened:
        rgb = opened.convert("RGB")
    return Image.of(rgb.width, rgb.height, rgb.tobytes())
