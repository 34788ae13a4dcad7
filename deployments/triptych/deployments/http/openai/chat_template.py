"""Finds out which inputs a chat template takes: tools, content as parts, variables, reasoning.

Templates do not state this, so small conversations are rendered once, and looked at.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment

from triptych.deployments.http.openai.named_calls import calls_in
from triptych.deployments.http.openai.reasoning_parser import (
    THINK_CLOSE,
    THINK_OPEN,
    Thinking,
    thinking_after,
)
from triptych.deployments.http.openai.tool_parser import ToolFormat, parse_call, parse_calls
from triptych.deployments.http.tokenizer import Tokenizer
from triptych.workers.sampling.tool_calls import CLOSE, OPEN, OPEN_CALLS

RESERVED = {
    "messages", "tools", "documents", "add_generation_prompt", "chat_template", "conversations",
    "continue_final_message", "tokenize", "return_assistant_tokens_mask", "functions",
    "raise_exception", "namespace", "strftime_now",
}  # fmt: skip
"""Variables that other fields set."""
ALWAYS_TAKEN = ("enable_thinking", "thinking")
"""Variables that clients send to any model; they are booleans."""

_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""transformers' own tag, which marks answers in training data."""

_PROBE = "triptychprobe"
_PROBE_TOOL: Mapping[str, object] = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}


class ChatTemplate:
    """The chat template of one model."""

    def __init__(self, tokenizer: Tokenizer, reasoning: str = "auto") -> None:
        """``reasoning``: ``think`` or ``none``; ``auto``: by the template."""
        self._tokenizer = tokenizer
        given = tokenizer.chat_template
        self._text = given if isinstance(given, str) else ""
        special = {token.content for token in tokenizer.added_tokens_decoder.values()
                   if token.special}  # fmt: skip
        tags = {THINK_OPEN, THINK_CLOSE}
        by_template = any(tag in self._text for tag in tags) and not tags & special
        self._thinks = reasoning == "think" or (reasoning == "auto" and by_template)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables of the template that requests may set."""
        found = self._looked_up - RESERVED
        return frozenset(name for name in found if not name.endswith("_token"))

    @property
    def takes_documents(self) -> bool:
        return "documents" in self._looked_up

    @cached_property
    def _looked_up(self) -> frozenset[str]:
        """Names that the template reads and does not set itself; none if it has an error."""
        environment = SandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        try:
            tree = environment.parse(_GENERATION.sub("", self._text))
        except TemplateError:
            return frozenset()
        return frozenset(find_undeclared_variables(tree)) - environment.globals.keys()

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the template writes calls, if it lists tools itself; None: it does not, or in a form
        that is not read."""
        call = {"type": "function", "id": "a" * 9,
                "function": {"name": _PROBE, "arguments": {"x": "1"}}}  # fmt: skip
        messages: list[Mapping[str, object]] = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        if _PROBE not in self._render(messages[:1], [_PROBE_TOOL]):
            return None
        called, names = self._render(messages, [_PROBE_TOOL]), frozenset([_PROBE])
        blocks = re.findall(f"{OPEN}(.*?){CLOSE}", called, re.DOTALL)
        if any(parse_call(block, names) for block in blocks):
            return ToolFormat.TAGS
        objects = re.findall(r'\{"name": "triptychprobe", "parameters": \{[^{}]*\}\}', called)
        if any(parse_call(text, names, ToolFormat.OBJECT) for text in objects):
            return ToolFormat.OBJECT
        arrays = re.findall(re.escape(OPEN_CALLS) + r"\s*(\[.*?\}\])", called, re.DOTALL)
        if any(parse_calls(text, names) for text in arrays):
            return ToolFormat.ARRAY
        if any(name == _PROBE for name, _, _ in calls_in(called)):
            return ToolFormat.NAMED
        return None

    @cached_property
    def takes_parts(self) -> bool:
        """Whether a message's content must be a list of parts, as for multimodal models."""
        whole = [{"role": "user", "content": _PROBE}]
        parts = [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
        return _PROBE not in self._render(whole) and _PROBE in self._render(parts)

    def warm_up(self) -> None:
        """Render the conversations now instead of at the first chat."""
        if self._text:
            _ = self._looked_up, self.tool_format, self.takes_parts

    def thinking(self, prompt_tail: str) -> Thinking:
        """How an output begins, by the last text of its prompt."""
        return thinking_after(prompt_tail) if self._thinks else Thinking.NO

    def effort(self, effort: str | None) -> Mapping[str, object]:
        """Variables for OpenAI's ``reasoning_effort``, as far as the template has them."""
        if effort is None:
            return {}
        found: dict[str, object] = {"reasoning_effort": effort}
        if effort == "none":
            found |= dict.fromkeys(ALWAYS_TAKEN, False)
        return {name: value for name, value in found.items() if name in self.variables}

    def _render(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None = None
    ) -> str:
        """The text of a conversation; empty if the template refuses it."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=None if tools is None else list(tools),
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError):
            return ""
