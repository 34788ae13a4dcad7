"""Encodes and decodes text; special-token names in user text never become control tokens."""

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Protocol, TypeVar, cast

from jinja2 import TemplateError

from triptych.core.errors import Overloaded, PromptTooLong, RequestError, Unsupported
from triptych.workers.sampling.token_bytes import piece_bytes

INLINE_CHARS = 2048
"""Texts up to this length are tokenized on the event loop, as a thread would cost more."""

LONGEST_CHARS = 128 << 10
"""Longer texts wait for each other; they take 0.1 s and more."""
MAX_WAITING = 256
"""Long texts that wait for a thread at most."""
HEAD_CHARS = 32 << 10
"""A text that is much longer than its context, and than this, is first encoded in part."""
CUT_TOKENS = 64
"""Tokens that a text may have more where it is cut."""

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
        conversation: list[dict[str, object]],
        *,
        tools: list[object] | None,
        tokenize: bool,
        add_generation_prompt: bool,
        **options: object,
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
        self._tokenizer = self.tokenizer = tokenizer
        self._context_tokens = context_tokens
        special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._special_ids, names = frozenset(special), set(special.values())
        # A name of one character cannot be cut in two.
        ordered = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        vocab = tokenizer.get_vocab()
        self._widest_chars = max(map(len, vocab), default=1)
        self._byte_level = "Ġ" in vocab
        self._threads = LongTexts()

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._tokenizer.chat_template is not None

    @property
    def vocab_tokens(self) -> int:
        return len(self._tokenizer)

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Encode a raw prompt; ``max_tokens``: refuse it if it has more.

        Raises: PromptTooLong; Overloaded
        """
        encoded = await self.encode_all(
            [text], add_special_tokens=add_special_tokens, max_tokens=max_tokens
        )
        return encoded[0]

    async def encode_all(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """Encode raw prompts; ``max_tokens``: refuse one that has more.

        Raises: PromptTooLong; Overloaded
        """

        def encode() -> list[list[int]]:
            return [self._encode(text, add_special_tokens, max_tokens) for text in texts]

        return await self._threads.run(sum(map(len, texts)), encode)

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        """Encode a text, but not the whole of one whose beginning has too many tokens."""
        head = _head_of(len(text), max_tokens)
        if max_tokens is not None and head:
            ids = self._tokenizer.encode(text[:head], add_special_tokens=False)
            self._check_tokens(len(ids) - CUT_TOKENS, max_tokens, "prompt")
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_tokens(self, least: int, most: int, param: str) -> None:
        """Raises: PromptTooLong if the beginning of a text has too many tokens"""
        if least > most:
            raise PromptTooLong(
                f"This model's maximum context length is {self._context_tokens} tokens. However, "
                f"your {param} has more than {least} tokens. Please reduce its length.",
                param,
            )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        options: Mapping[str, object] = MappingProxyType({}),
        tools: Sequence[object] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Render messages with the model's chat template and encode the result.

        ``continue_final`` leaves out what the template has after the text of the last message;
        ``options`` are variables of the template, ``tools`` are for templates that list them;
        ``max_tokens``: refuse messages that have more.

        Raises: RequestError if the template refuses the messages; PromptTooLong; Overloaded;
            Unsupported if the model has no template
        """
        if not self.has_template:
            raise Unsupported("this model has no chat template: use /v1/completions", "messages")

        def encode() -> list[int]:
            return self._encode_chat(
                (messages, tools, options), add_generation_prompt, continue_final, max_tokens
            )

        return await self._threads.run(_chars([*messages, *(tools or ())]), encode)

    def _encode_chat(
        self,
        given: object,
        add_generation_prompt: bool,
        continue_final: bool,
        max_tokens: int | None,
    ) -> list[int]:
        """``given``: messages, tools and options, in which special tokens are text."""
        mark = f"\ue000{secrets.token_hex(8)}\ue000"
        marked, tools, options = cast(
            "tuple[list[dict[str, object]], list[object] | None, dict[str, object]]",
            self._marked(given, mark),
        )
        end = f"\ue000{secrets.token_hex(8)}\ue000"
        if continue_final:
            marked[-1]["content"] = _with_end(marked[-1]["content"], end)
        try:
            text = self._tokenizer.apply_chat_template(
                marked,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **options,
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
        is_long = _head_of(len(rendered), max_tokens) > 0
        for piece in rendered.split(mark):
            ids += self._encode(piece, False, max_tokens)
            if is_long and max_tokens is not None:
                self._check_tokens(len(ids), max_tokens, "messages")
        return ids

    def _marked(self, value: object, mark: str) -> object:
        """The same JSON value, with the marks of ``_cut_special`` in each text and key."""
        match value:
            case str():
                return self._cut_special(value, mark)
            case Mapping():
                items = cast("Mapping[str, object]", value).items()
                return {
                    self._cut_special(key, mark): self._marked(item, mark) for key, item in items
                }
            case list() | tuple():
                return [self._marked(item, mark) for item in cast("Sequence[object]", value)]
            case _:
                return value

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

        return await self._threads.run(len(ids), decode)

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


def _chars(value: object) -> int:
    """Characters of the texts in a JSON value."""
    match value:
        case str():
            return len(value)
        case Mapping():
            return sum(map(_chars, cast("Mapping[str, object]", value).values()))
        case list() | tuple():
            return sum(map(_chars, cast("Sequence[object]", value)))
        case _:
            return 0


def _with_end(content: object, end: str) -> object:
    """A message's content with a mark at its end; it is a text, or a list of parts."""
    if not isinstance(content, list):
        return f"{content}{end}"
    *parts, last = cast("list[dict[str, object]]", content)
    return [*parts, {**last, "text": f"{last['text']}{end}"}]


def _head_of(chars: int, max_tokens: int | None) -> int:
    """Characters to encode first of a text that is likely to have too many tokens; else 0."""
    head = HEAD_CHARS + 4 * (max_tokens or 0)
    return head if max_tokens is not None and chars > 1.5 * head else 0


class LongTexts:
    """Threads for texts that would hold the event loop for long.

    They are few, since other work needs the cores as well; the longest texts have one of their
    own, so that others do not wait for them. What waits is bounded.
    """

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._long = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self._longest = ThreadPoolExecutor(1, thread_name_prefix="long-tokenizer")
        self._waiting = 0
        """Texts that wait for a thread, or are in one."""

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run ``work``, in a thread if ``size`` is large.

        Raises: Overloaded if too much waits for a thread
        """
        if size <= INLINE_CHARS:
            return work()
        if self._waiting >= self._max_waiting:
            raise Overloaded(f"{self._waiting} long prompts wait to be tokenized")
        self._waiting += 1
        try:
            executor = self._longest if size > LONGEST_CHARS else self._long
            return await asyncio.get_running_loop().run_in_executor(executor, work)
        finally:
            self._waiting -= 1
