"""Bounds on what one request may hold, and on its images."""

from dataclasses import dataclass, fields

from triptych.core.config.values import MIB, require

MAX_PIXELS = 20_000_000
"""Most pixels of an image that may ever be allowed: it passes between stages in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimitsConfig:
    """Bounds on what one request may hold, so that no body keeps the ingress busy for long.

    They are checked before a body is validated; ordinary requests do not reach them. A request
    above one of them is answered with 400.
    """

    max_sequences: int = 64
    """Most sequences of one request: its prompts times ``n``."""

    max_messages: int = 2048
    """Most messages of a chat."""

    max_content_parts: int = 2048
    """Most content parts of a request, over all its messages."""

    max_tool_calls: int = 2048
    """Most tool calls in the messages of a request, over all its messages."""

    max_tools: int = 128
    """Most tools of a request."""

    max_stops: int = 16
    """Most stop texts of a request."""

    max_stop_token_ids: int = 128
    """Most stop token ids of a request."""

    max_logit_bias: int = 1024
    """Most entries of ``logit_bias``."""

    max_guided_choices: int = 4096
    """Most texts of ``guided_choice``."""

    max_json_values: int = 200_000
    """Most JSON values of a body, which includes each token id of a prompt. JSON inside of JSON,
    such as the arguments of tool calls, counts as well."""

    max_json_keys: int = 32_768
    """Most keys of JSON objects in a body; counted likewise."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            name = f"ingress.limits.{setting.name}"
            require(getattr(self, setting.name) >= 1, name, getattr(self, setting.name), ">= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimitsConfig:
    """Bounds on the images of requests. An image above one of them is answered with 400."""

    max_images: int = 16
    """Most images of one request."""

    max_image_bytes: int = 8 * MIB
    """Largest encoded image. ``ingress.max_body_bytes`` bounds all of a request, in base64."""

    max_image_pixels: int = 12_582_912
    """Most pixels of one image, by its header; a larger one is not decoded."""

    max_request_pixels: int = 33_554_432
    """Most pixels of all images of one request."""

    max_held_bytes: int = 256 * MIB
    """Most bytes of decoded images that one ingress replica holds for the requests that run; a
    request beyond it gets 503."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            name = f"ingress.images.{setting.name}"
            require(getattr(self, setting.name) >= 1, name, getattr(self, setting.name), ">= 1")
        most, each = self.max_request_pixels, MAX_PIXELS
        name = "ingress.images.max_image_pixels"
        require(self.max_image_pixels <= each, name, self.max_image_pixels, f"at most {each}")
        name, held = "ingress.images.max_held_bytes", self.max_held_bytes
        require(held >= 3 * most, name, held, f"3 bytes of each of max_request_pixels ({most})")
