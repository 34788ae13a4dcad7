"""Chats with images become prompts with placeholders; what cannot be is refused by name."""

import asyncio
from dataclasses import replace

import pytest

from tests.tiny import byte_tokenizer
from tests.tiny_vision import TEMPLATE, data_uri, random_images
from tests.unit.deployments.http.conftest import FakeEngine
from triptych.core.config import IngressConfig
from triptych.core.errors import PromptTooLong, RequestError
from triptych.core.images import Fixed, ImageLayout
from triptych.deployments.http import ModelCard
from triptych.deployments.http.openai.protocol import ChatBody, validate
from triptych.deployments.http.openai.request_builder import Job, RequestBuilder
from triptych.deployments.http.tokenizer import TextCodec

FIRST, SECOND = (data_uri(one) for one in random_images(2, seed=4))
PLACEHOLDER = 258


def part(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def text(given: str) -> dict[str, object]:
    return {"type": "text", "text": given}


def chat(content: object, *, reads_images: bool = True, **more: object) -> Job:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    rule = Fixed(tokens=(PLACEHOLDER,) * 6)
    layout = ImageLayout(placeholder=PLACEHOLDER, feature_bytes=20, rule=rule)
    card = ModelCard(name="tiny", context_tokens=200, window_tokens=100, created=0, images=layout)
    builder = RequestBuilder(
        engine=FakeEngine(letters=[]),
        codec=TextCodec(tokenizer, 200),
        model=card if reads_images else replace(card, images=None),
        config=IngressConfig(),
    )
    body = {"messages": [{"role": "user", "content": content}], **more}
    return asyncio.run(builder.chat(validate(ChatBody, body)))


def test_each_image_stands_where_it_was_sent() -> None:
    job = chat([part(FIRST), text("a <image> b"), part(SECOND), part(FIRST)])
    (request,) = job.requests
    assert [one.digest for one in request.images] == [one.digest for one in job.images]
    assert request.images[0].digest == request.images[2].digest != request.images[1].digest
    places = [at for at, token in enumerate(request.prompt) if token == PLACEHOLDER]
    assert places == [at for one in request.images for at in range(one.start, one.stop)]
    assert job.prompt_tokens == len("user: a <image> b\nassistant: ") + 3 * 6
    assert request.sampling.max_tokens == 100 - job.prompt_tokens


def test_text_alone_is_the_prompt_of_before() -> None:
    (request,) = chat([text("a <image> b")]).requests
    assert PLACEHOLDER not in request.prompt
    assert not request.images


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        ([part("https://example.org/a.png")], {}, "data URIs"),
        ([part("data:image/png;base64,AAAA")], {}, "not an image"),
        ([part(FIRST)] * 17, {}, "max_images"),
        ([part(FIRST)], {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ([part(FIRST)], {"prompt_logprobs": 1}, "prompt_logprobs"),
        ([{"type": "input_audio", "input_audio": {}}], {}, "input_audio"),
        ([{"type": "image_url", "image_url": FIRST[:40]}], {}, "an object"),
    ],
)
def test_what_cannot_be_read_is_refused(
    content: list[object], more: dict[str, object], said: str
) -> None:
    with pytest.raises(RequestError, match=said) as error:
        chat(content, **more)
    assert error.value.http_status == 400


def test_a_model_of_text_says_so_and_a_prompt_must_fit_the_models_own_context() -> None:
    with pytest.raises(RequestError, match="text only") as error:
        chat([text("see"), part(FIRST)], reads_images=False)
    assert error.value.param == "messages.0.content.1"
    with pytest.raises(PromptTooLong):
        chat([text("x" * 90), part(FIRST)])
