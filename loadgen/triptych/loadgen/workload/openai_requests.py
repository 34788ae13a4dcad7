"""Request bodies for OpenAI-compatible servers, with prompts of exact length."""

import base64
import io
import random
from dataclasses import dataclass
from typing import Literal

from PIL import Image

from triptych.core.config import require
from triptych.loadgen.workload.load import Load
from triptych.loadgen.workload.shapes import SHAPES
from triptych.loadgen.workload.turns import Segment, Turn

IMAGE_SIDE = 224
"""Pixels of a generated image in each direction."""
SQUARES = 8
"""Squares of one colour in each direction of it."""

PromptForm = Literal["tokens", "text"]
Endpoint = Literal["completions", "chat"]

_TEXT = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason research girl
guy moment air teacher force education
"""

WORDS = tuple(_TEXT.split())
"""Common English words; in most vocabularies each is one token with its space."""


@dataclass(frozen=True, kw_only=True)
class Workload(Load):
    """A load, and the form of its requests."""

    model: str
    endpoint: Endpoint = "completions"
    form: PromptForm = "tokens"
    """``tokens``: prompts are token ids (exact); ``text``: words (exact after calibration)."""

    vocab_size: int = 32_000
    """Token ids are below this; lower it for a model with a smaller vocabulary."""

    extra_words: int = 0
    """Words minus tokens of a text prompt; negative if a template adds tokens."""

    temperature: float = 0.0

    def body(self, turn: Turn) -> dict[str, object]:
        """The JSON body of one request; deterministic for a seed."""
        shared: dict[str, object] = {
            "model": self.model,
            "max_tokens": turn.output_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        prompt = self._ids(turn) if self.form == "tokens" else self._text(turn)
        if turn.images:
            return shared | {"messages": [{"role": "user", "content": self._parts(turn)}]}
        if self.endpoint == "chat":
            return shared | {"messages": [{"role": "user", "content": prompt}]}
        return shared | {"prompt": prompt}

    def __post_init__(self) -> None:
        """Raises: ConfigError if a workload with images is no chat in text"""
        if self.shape in SHAPES and SHAPES[self.shape].has_images:
            found = f"{self.endpoint}, {self.form}"
            expected = f"chat and text with the workload {self.shape}: images are parts of chats"
            is_chat = (self.endpoint, self.form) == ("chat", "text")
            require(is_chat, "--endpoint, --prompts", found, expected)

    def _parts(self, turn: Turn) -> list[dict[str, object]]:
        """Content of a chat: an image behind each piece of the text."""
        words, count = self._text(turn).split(), len(turn.images)
        parts = list[dict[str, object]]()
        for number, key in enumerate(turn.images):
            piece = words[number * len(words) // count : (number + 1) * len(words) // count]
            parts.append({"type": "text", "text": " ".join(piece)})
            parts.append({"type": "image_url", "image_url": {"url": self._image(key)}})
        return parts

    def _image(self, key: str) -> str:
        """A data URI of squares of random colours."""
        source = random.Random(f"{self.seed}/{key}")
        small = Image.frombytes("RGB", (SQUARES, SQUARES), source.randbytes(3 * SQUARES**2))
        buffer = io.BytesIO()
        small.resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.NEAREST).save(buffer, "PNG")
        return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")

    def _ids(self, turn: Turn) -> list[int]:
        low = min(1000, self.vocab_size // 2)  # special tokens and bytes have the lowest ids
        return [
            rng.randrange(low, self.vocab_size)
            for segment in turn.segments
            for rng in [self._source(segment)]
            for _ in range(segment.tokens)
        ]

    def _text(self, turn: Turn) -> str:
        """Text of a prompt; the length is corrected at the end, after the shared prefix."""
        words = [
            rng.choice(WORDS)
            for segment in turn.segments
            for rng in [self._source(segment)]
            for _ in range(segment.tokens)
        ]
        count = max(1, turn.prompt_tokens + self.extra_words)
        more = random.Random(f"{self.seed}/more")
        words += [more.choice(WORDS) for _ in range(count - len(words))]
        return " ".join(words[:count])

    def _source(self, segment: Segment) -> random.Random:
        return random.Random(f"{self.seed}/{segment.key}")
