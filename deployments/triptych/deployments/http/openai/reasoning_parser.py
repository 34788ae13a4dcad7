"""Reasoning: where it begins, grammars that begin after it, and a parser that separates it.

The form is that of Qwen3, DeepSeek-R1, SmolLM3 and others: reasoning is between ``<think>`` and
``</think>``, before anything else. Some templates write the opening tag, or both, into the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from triptych.core.messages import FinishReason
from triptych.workers.sampling.tool_calls import overlap

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class Thinking(Enum):
    """How an output begins."""

    NO = "no"
    """Without reasoning."""
    MAYBE = "maybe"
    """With reasoning if its first text is the opening tag."""
    OPEN = "open"
    """Inside of reasoning: the prompt ends with the opening tag."""


def thinking_after(prompt_tail: str) -> Thinking:
    """How the output of a reasoning model begins, by the last text of its prompt.

    >>> thinking_after("<|im_start|>assistant\\n<think>\\n"), thinking_after("assistant\\n")
    (<Thinking.OPEN: 'open'>, <Thinking.MAYBE: 'maybe'>)
    """
    tail = prompt_tail.rstrip()
    if tail.endswith(THINK_CLOSE):
        return Thinking.NO
    return Thinking.OPEN if tail.endswith(THINK_OPEN) else Thinking.MAYBE


def after_thinking(thinking: Thinking, start: str) -> Sequence[str]:
    """Lark rules of an output that begins with reasoning, and then follows ``start``.

    ``start`` is the right-hand side of a rule.
    """
    if thinking is Thinking.NO:
        return [f"start: {start}"]
    # The newline lets scanners of JSON begin anew.
    rules = [f'thought[lazy]: THOUGHT "{THINK_CLOSE}"', r"THOUGHT: /(.|\n)*/", r"GAP: /\n{1,4}/"]
    if thinking is Thinking.OPEN:
        return [f"start: thought GAP ({start})", *rules]
    return [f'start: ("{THINK_OPEN}" thought GAP)? ({start})', *rules]


@dataclass
class ReasoningParser:
    """Separates reasoning from the text after it in streamed output.

    All splits of an output into pieces give the same two texts. White space at both ends of the
    reasoning, and between it and the text, is dropped.
    """

    thinking: Thinking
    _rest: str = ""
    """Text that may begin a tag, or that is white space which only counts if more follows."""
    _has_reasoning: bool = False
    _is_done: bool = field(init=False)
    """Whether the reasoning is over, or there is none."""
    _skips_space: bool = False
    """Whether white space is dropped until text comes."""

    def __post_init__(self) -> None:
        self._is_done = self.thinking is Thinking.NO

    def read(self, text: str, *, finish: FinishReason | None = None) -> tuple[str, str]:
        """The reasoning and the text that a piece of output adds."""
        if self._is_done:
            return "", self._text(text)
        self._rest += text
        if self.thinking is Thinking.MAYBE:
            first = self._rest.lstrip()
            if len(first) < len(THINK_OPEN) and THINK_OPEN.startswith(first) and not finish:
                return "", ""
            if not first.startswith(THINK_OPEN):
                return "", self._end()
            self.thinking, self._rest = Thinking.OPEN, first.removeprefix(THINK_OPEN)
        return self._reason(finish)

    def _reason(self, finish: FinishReason | None) -> tuple[str, str]:
        if not self._has_reasoning:
            self._rest = self._rest.lstrip()
        thought, close, text = self._rest.partition(THINK_CLOSE)
        if close:
            self._rest, self._skips_space = text, True
            return thought.rstrip(), self._end()
        held = 0 if finish else overlap(self._rest, THINK_CLOSE)
        kept = self._rest[: len(self._rest) - held].rstrip()
        self._rest = self._rest[len(kept) :]
        self._has_reasoning |= bool(kept)
        return kept, ""

    def _end(self) -> str:
        text, self._rest, self._is_done = self._rest, "", True
        return self._text(text)

    def _text(self, text: str) -> str:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text
