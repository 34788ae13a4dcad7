"""Images of a chat: the parts of its messages that name them, and what does not go with them."""

from collections.abc import Sequence
from dataclasses import replace

from triptych.core.errors import Unsupported
from triptych.core.images import ImageSpan
from triptych.core.messages import Request
from triptych.deployments.http.openai.protocol import ChatBody, Message
from triptych.deployments.images import ImageSource


def image_sources(messages: Sequence[Message]) -> list[ImageSource]:
    """The images of all messages, in order."""
    return [
        ImageSource(url, f"messages.{index}.content.{part}")
        for index, message in enumerate(messages)
        for part, url in message.images
    ]


def check_fields(body: ChatBody) -> None:
    """Raises: Unsupported for a field that does not go with images"""
    others = {
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
        "prompt_logprobs": body.prompt_logprobs is not None,
    }
    for name, is_set in others.items():
        if is_set:
            raise Unsupported(f"{name}: not with images; leave it out", name)


def with_images(request: Request, spans: tuple[ImageSpan, ...], room: int) -> Request:
    """A request with the images of its prompt, and an answer of at most ``room`` tokens."""
    most = min(room, request.sampling.max_tokens)
    return replace(request, images=spans, sampling=replace(request.sampling, max_tokens=most))
