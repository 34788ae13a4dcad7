"""Encodes and decodes text; special-token names in user text never become control tokens."""

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, TypeVar, cast

from jinja2 import TemplateError

from triptych.core.errors import PromptTooLong, RequestError, Unsupported
from triptych.workers.sampling.token_bytes import piece_bytes

INLINE_CHARS = 2048
"""Texts up to this length are tokenized on the event loop, as a thread would cost more."""

T = TypeVar("T")


class AddedToken(Protocol):
    """A token outside the trained vocabulary, such as ``<|im_end|>``."""

    @property
    def content(self) -> str: ...
    @property
    def special(self) -> bool: ...


class Tokenizer(Protocol):
    """The part of a tokenizer that the HTTP side uses; transformers' fast ones fit as they are."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...
    @property
    def chat_template(self) -> object: ...
    def __len__(self) -> int: ...
    def get_vocab(self) -> Mapping[str, int]: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> object: ...
    def convert_ids_to_tokens(self, ids: list[int]) -> object: ...
    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **options: bool,
    ) -> object: ...


class TextCodec:
    """Encodes prompts and decodes tokens, for one model.

    A special token's name in a chat message is encoded as ordinary text. A mark is inserted after
    its first character, the chat template is rendered, and the pieces between marks are encoded
    one by one. No piece has the whole name, so only names in the template itself become special
    tokens. Messages without such names are encoded in one piece, with the same ids as by
    transformers. A raw prompt of ``/v1/completions`` may contain special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, context_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._special_ids, names = frozenset(special), set(special.values())
        # A name of one character cannot be cut in two.
        ordered = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        vocab = tokenizer.get_vocab()
        self._widest_chars = max(map(len, vocab), default=1)
        self._byte_level = "Ġ" in vocab

    @property
    def vocab_tokens(self) -> int:
        return len(self._tokenizer)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a raw prompt."""

        def encode() -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await _off_loop(len(text), encode)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        options: Mapping[str, bool] = MappingProxyType({}),
    ) -> list[int]:
        """Render messages with the model's chat template and encode the result.

        ``continue_final`` leaves out what the template has after the text of the last message;
        ``options`` are variables of the template.

        Raises: RequestError if the template refuses the messages; Unsupported if the model
            has no template
        """
        if self._tokenizer.chat_template is None:
            raise Unsupported("this model has no chat template: use /v1/completions", "messages")

        def encode() -> list[int]:
            return self._encode_chat(messages, add_generation_prompt, continue_final, options)

        return await _off_loop(sum(len(m["content"]) for m in messages), encode)

    def _encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool,
        continue_final: bool,
        options: Mapping[str, bool],
    ) -> list[int]:
        mark = f"\ue000{secrets.token_hex(8)}\ue000"
        marked = [{**m, "content": self._cut_special(m["content"], mark)} for m in messages]
        end = f"\ue000{secrets.token_hex(8)}\ue000"
        if continue_final:
            marked[-1]["content"] += end
        try:
            text = self._tokenizer.apply_chat_template(
                marked, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        except TemplateError as error:
            reason = f"the model's chat template refuses these messages: {error}"
            raise RequestError(reason, "messages") from error
        rendered, found, _ = str(text).partition(end)
        if continue_final and not found:
            reason = (
                "the model's chat template leaves the last message out: nothing goes on with it"
            )
            raise RequestError(reason, "continue_final_message")
        ids: list[int] = []
        for piece in rendered.split(mark):
            ids += self._tokenizer.encode(piece, add_special_tokens=False)
        return ids

    def _cut_special(self, text: str, mark: str) -> str:
        pieces: list[str] = []
        start = at = 0
        while found := self._special.search(text, at):
            # Continue one character later, not after the match, as names may overlap.
            at = found.start() + 1
            pieces.append(text[start:at])
            start = at
        return mark.join([*pieces, text[start:]])

    def check_length(self, chars: int, param: str) -> None:
        """Reject a text that cannot fit the context before it is tokenized.

        No token covers more characters than the longest entry of the vocabulary.

        Raises: PromptTooLong
        """
        least = -(-chars // self._widest_chars)
        if least > self._context_tokens:
            raise PromptTooLong(
                f"This model's maximum context length is {self._context_tokens} tokens. However, "
                f"your prompt of {chars} characters has at least {least} tokens. "
                "Please reduce the length of the prompt.",
                param,
            )

    async def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, special tokens included."""

        def decode() -> str:
            return cast("str", self._tokenizer.decode(list(ids), skip_special_tokens=False))

        return await _off_loop(len(ids), decode)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The tokens' strings in the vocabulary."""
        names = cast("list[str | None]", self._tokenizer.convert_ids_to_tokens(list(ids)))
        # Ids between the tokenizer's size and the model's have no name.
        return [name or "" for name in names]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token's text; they may be part of a character."""
        return piece_bytes(self.pieces([token])[0], byte_level=self._byte_level)

    def is_special(self, token: int) -> bool:
        """Whether ``skip_special_tokens`` leaves the token out of the text."""
        return token in self._special_ids


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    """Run ``work`` in a thread if it is long, so that other streams go on meanwhile."""
    return work() if size <= INLINE_CHARS else await asyncio.to_thread(work)
