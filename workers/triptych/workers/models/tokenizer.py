# transformers leaves much of its tokenizers untyped; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""A model's tokenizer without transformers and torch, which take seconds to import.

transformers builds the tokenizer from a model's directory once; the result is cached on disk as
JSON. A process that needs only the tokenizer, such as a restarted ingress, starts seconds sooner
from the cache.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from tokenizers import AddedToken, Tokenizer

from triptych.core.errors import ConfigError
from triptych.core.images import ImageLayout
from triptych.workers.models.store.metadata_cache import DESCRIBING_FILES, cached

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

INLINE_TOKENS = 1024
"""Tokens whose decoding takes too short for releasing the GIL."""

SpecialTokens = Mapping[str, str | list[str]]


@dataclass(frozen=True)
class FastTokenizer:
    """The subset of transformers' fast tokenizers that serving needs.

    Methods have the names and results of transformers'.
    """

    backend: Tokenizer
    chat_template: str | None
    special_tokens: SpecialTokens
    """By role, such as ``bos_token``; chat templates use them."""
    tool_template: str | None = None
    """The template for conversations with tools, if the model has one of its own for them."""
    image_texts: tuple[str, str] = ("", "")
    """What the template writes for an image, and what is tokenized in its place; "": the same."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        return self.backend.get_added_tokens_decoder()

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of tokens with a role, and of tokens added as special."""
        roles = self.special_tokens.values()
        names = [name for role in roles for name in ([role] if isinstance(role, str) else role)]
        known = [self.backend.token_to_id(name) for name in names]
        added = [token for token, content in self.added_tokens_decoder.items() if content.special]
        return sorted({token for token in (*known, *added) if token is not None})

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> Mapping[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Of tokenizers' methods only those for batches release the GIL.
        batch = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        if len(token_ids) <= INLINE_TOKENS:
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        # The method for batches releases the GIL.
        return self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self.backend.id_to_token(token) for token in ids]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, object]],
        *,
        tools: list[object] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        **options: object,
    ) -> str:
        """Render a conversation to text, in transformers' sandbox.

        ``options`` are variables of the template.

        Raises: jinja2's TemplateError if the template rejects it; ValueError if ``tokenize``
        """
        if tokenize:
            raise ValueError("tokenize: encode the text that this returns")
        render = _renderer()
        messages = [
            {key: value for key, value in message.items() if value is not None}
            for message in conversation
        ]
        texts, _ = render(
            conversations=[messages],
            tools=tools,
            chat_template=(self.tool_template if tools else None) or self.chat_template,
            add_generation_prompt=add_generation_prompt,
            **options,
            **self.special_tokens,
        )
        written, read_as = self.image_texts
        return texts[0].replace(written, read_as) if written else texts[0]


def open_tokenizer(model: Path) -> FastTokenizer:
    """The tokenizer of a model's directory; built by transformers the first time.

    Raises: ModelError if the directory has none that can be used
    """
    return cached("tokenizers", model, DESCRIBING_FILES, lambda: _build(model), from_json)


def _build(model: Path) -> str:
    from triptych.workers.models.pretrained import (  # noqa: PLC0415 - takes seconds, rarely needed
        read_tokenizer,
    )

    return to_json(read_tokenizer(model), _processor_template(model))


def _processor_template(model: Path) -> str | None:
    """The chat template of older vision-language models, which their tokenizer has not."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((model / "chat_template.json").read_text(encoding="utf-8"))
        return str(found["chat_template"])
    return None


def to_json(tokenizer: "PreTrainedTokenizerFast", processor_template: str | None = None) -> str:
    """Serialize a transformers tokenizer, for ``from_json``.

    ``processor_template``: the chat template if the tokenizer has none.
    """
    template: str | None = None
    # None: no template, or several without a default.
    with suppress(ValueError):
        template = tokenizer.get_chat_template()
    template = template or processor_template
    content = {
        "backend": tokenizer.backend_tokenizer.to_str(),
        "chat_template": template,
        "tool_template": _tool_template(cast("object", tokenizer.chat_template)),
        "special_tokens": tokenizer.special_tokens_map,
        "split_special_tokens": tokenizer.split_special_tokens,
    }
    return json.dumps(content)


def from_json(text: str) -> FastTokenizer:
    """A tokenizer from the text that ``to_json`` wrote."""
    content = cast("dict[str, object]", json.loads(text))
    backend = Tokenizer.from_str(cast("str", content["backend"]))
    backend.encode_special_tokens = bool(content["split_special_tokens"])
    backend.no_truncation()
    backend.no_padding()
    return FastTokenizer(
        backend=backend,
        chat_template=cast("str | None", content["chat_template"]),
        special_tokens=cast("SpecialTokens", content["special_tokens"]),
        tool_template=cast("str | None", content["tool_template"]),
    )


def _tool_template(templates: object) -> str | None:
    """The template called ``tool_use`` of a model that has several."""
    if not isinstance(templates, dict):
        return None
    found = cast("dict[str, object]", templates).get("tool_use")
    return found if isinstance(found, str) else None


def with_chat_template(tokenizer: FastTokenizer, template: str) -> FastTokenizer:
    """The tokenizer with an operator's chat template; empty: with that of the model."""
    if not template:
        return tokenizer
    return replace(tokenizer, chat_template=template, tool_template=None)


def with_images(tokenizer: FastTokenizer, layout: ImageLayout | None) -> FastTokenizer:
    """The tokenizer with what a model reads for an image; None: it reads none."""
    if layout is None:
        return tokenizer
    return replace(tokenizer, image_texts=(layout.written, layout.read_as))


def read_chat_template(file: str) -> str:
    """The text of an operator's chat template; empty if the setting is.

    Raises: ConfigError if it cannot be read, or is not a template
    """
    if not file:
        return ""
    from jinja2 import TemplateError  # noqa: PLC0415 - few settings need it
    from transformers.utils.chat_template_utils import (  # noqa: PLC0415
        _compile_jinja_template,  # pyright: ignore[reportPrivateUsage]
    )

    try:
        text = Path(file).read_text(encoding="utf-8")
        _compile_jinja_template(text)
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        raise ConfigError(f"model.chat_template={file!r}: {error}") from error
    return text


class _Render(Protocol):
    """transformers' ``render_jinja_template``, as far as it is used here."""

    def __call__(
        self,
        *,
        conversations: Sequence[object],
        tools: list[object] | None,
        chat_template: str | None,
        add_generation_prompt: bool,
        **variables: object,
    ) -> tuple[list[str], object]: ...


def _renderer() -> _Render:
    """transformers' template renderer; importing it takes half a second and no torch."""
    from transformers.utils.chat_template_utils import (  # noqa: PLC0415
        render_jinja_template,
    )

    return cast("_Render", render_jinja_template)
