"""Tool calls: tools in the prompt, a grammar for the output, and a parser of calls.

The format is that of Hermes and Qwen: tools are listed in the system message, a call is JSON
between ``<tool_call>`` and ``</tool_call>``, a result is between ``<tool_response>`` tags. With
models that were not trained on this format the grammar enforces the form, name and arguments of a
call.
"""

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from triptych.core.errors import GrammarError, RequestError
from triptych.core.grammar import GrammarSource, bounded_schema, schema_source
from triptych.deployments.grammars import GrammarCompiler
from triptych.deployments.http.openai.guided_decoding import OutputConstraint, check_own_end
from triptych.deployments.http.openai.protocol import ChatBody, Message, NamedTool, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
RESULT = "<tool_response>\n{}\n</tool_response>"
INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
ANY_ARGUMENTS: dict[str, object] = {"type": "object"}

Turn = dict[str, str]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call in the output."""

    name: str
    arguments: str
    """JSON."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


# ---------------------------------------------------------------- request fields


def tools_of(body: ChatBody) -> list[Tool]:
    """The tools that the output may call.

    Raises: RequestError naming the field
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools", "tool_choice")
        return []
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise RequestError("two tools have the same name", "tools")
    if choice == "none":
        return []
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in body.tools if tool.function.name == choice.function.name]
        if not chosen:
            text = f"no tool is called {choice.function.name!r}: expected one of {sorted(names)}"
            raise RequestError(text, "tool_choice.function.name")
        return chosen
    return list(body.tools)


def must_call(body: ChatBody) -> bool:
    """Whether the output must be a call."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


# ---------------------------------------------------------------- prompt


def turns_of(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Turn]:
    """Messages for the chat template, with tools, calls and results formatted into their text.

    Raises: RequestError if a result belongs to no call
    """
    turns, open_calls = list[Turn](), set[str]()
    for index, message in enumerate(messages):
        turn = message.for_template()
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                text = f"tool_call_id {message.tool_call_id!r} answers no call before it"
                raise RequestError(text, f"messages.{index}.tool_call_id")
            turn = {"role": "user", "content": RESULT.format(message.text)}
            if (
                index and messages[index - 1].role == "tool"
            ):  # results of one turn become one message
                turns[-1]["content"] += "\n" + turn["content"]
                continue
        given = message.tool_calls if message.role == "assistant" else []
        calls = [_call_text(call.function.name, call.function.arguments) for call in given]
        open_calls |= {call.id for call in given}
        turn["content"] = "\n".join([turn["content"]] * bool(turn["content"]) + calls)
        turns.append(turn)
    return _with_tools(turns, tools) if tools else turns


def _call_text(name: str, arguments: str) -> str:
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CLOSE}'


def _with_tools(turns: list[Turn], tools: Sequence[Tool]) -> list[Turn]:
    instructions = INSTRUCTIONS.format("\n".join(_signature(tool) for tool in tools))
    if turns[0]["role"] != "system":
        return [{"role": "system", "content": instructions}, *turns]
    first = {**turns[0], "content": f"{turns[0]['content']}\n\n{instructions}"}
    return [first, *turns[1:]]


def _signature(tool: Tool) -> str:
    function = tool.function
    signature = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters or ANY_ARGUMENTS,
    }
    return json.dumps({"type": "function", "function": signature}, ensure_ascii=False)


# ---------------------------------------------------------------- grammar of the output


async def grammar_of(
    body: ChatBody,
    tools: Sequence[Tool],
    compiler: GrammarCompiler,
    constraint: OutputConstraint | None = None,
) -> str:
    """The grammar of calls with valid arguments, and of text unless a call is required.

    ``constraint``: what the text must be, if there is no call.

    Raises: RequestError naming a tool whose parameters have no grammar, or a field that tools
        exclude; Overloaded
    """
    check_own_end(body, "an answer that may call tools")
    places = {tool.function.name: index for index, tool in enumerate(body.tools)}
    calls = [await _body(tool, f"tools.{places[tool.function.name]}", compiler) for tool in tools]
    once = not body.parallel_tool_calls or isinstance(body.tool_choice, NamedTool)
    rules = [f'body: "\\n" ({" | ".join(f"({call})" for call in calls)}) "\\n{CLOSE}"']
    if must_call(body) or constraint is not None:
        rules += [f"calls: {'call' if once else 'call (CALL_GAP call)*'}", f'call: "{OPEN}" body']
        rules += [] if once else ['CALL_GAP: "\\n"']
    if must_call(body):
        rules.append("start: calls")
    elif constraint is not None:
        rules.append(f"start: calls | answer\nanswer: {_rule(constraint)}")
    else:
        rules += [
            f"start: (found body){'?' if once else '*'} TEXT",
            f'found[lazy]: TEXT "{OPEN}"',
            "TEXT: /(.|\\n)*/",
        ]
    try:
        return await compiler.compile(GrammarSource("lark", "\n".join(rules)))
    except GrammarError as error:
        raise RequestError(f"tools: {error}", "tools") from error


async def _body(tool: Tool, param: str, compiler: GrammarCompiler) -> str:
    function = tool.function
    schema = function.parameters or ANY_ARGUMENTS
    try:
        await compiler.compile(schema_source(schema))
    except GrammarError as error:
        if function.strict:
            raise RequestError(f"{error}", f"{param}.function.parameters") from error
        schema = ANY_ARGUMENTS
    head = json.dumps(f'{{"name": {json.dumps(function.name)}, "arguments": ')
    return f'{head} %json {json.dumps(bounded_schema(schema))} "}}"'


def _rule(constraint: OutputConstraint) -> str:
    """The right-hand side of a Lark rule for what constrains the text."""
    if constraint.schema is not None:
        return f"%json {json.dumps(bounded_schema(constraint.schema))}"
    if constraint.regex is not None:
        return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", constraint.regex) + "/"
    if constraint.choice is not None:
        return " | ".join(map(json.dumps, constraint.choice))
    return f"%lark {{\n{constraint.lark}\n}}"


# ---------------------------------------------------------------- parser of the output


@dataclass
class ToolParser:
    """Separates tool calls from text in streamed output."""

    names: frozenset[str]
    _buffer: str = ""
    """Text that may be a call, or the beginning of one."""

    def read(self, text: str, *, is_last: bool = False) -> Iterator[str | ParsedCall]:
        """Parse the next piece: yields text, and calls when they are complete.

        Text between call tags that is no valid call is yielded as text.
        """
        self._buffer += text
        while (found := self._buffer.find(OPEN)) >= 0:
            end = self._buffer.find(CLOSE, found)
            if end < 0:
                break
            yield from self._text(self._buffer[:found])
            block = self._buffer[found : end + len(CLOSE)]
            self._buffer = self._buffer[end + len(CLOSE) :]
            yield self._call(block) or block
        keep = len(self._buffer) if is_last else self._text_chars(found)
        yield from self._text(self._buffer[:keep])
        self._buffer = self._buffer[keep:]

    def _text_chars(self, found: int) -> int:
        """Number of buffered characters that cannot be part of a call."""
        if found >= 0:
            return found
        longest = min(len(OPEN) - 1, len(self._buffer))
        ends = (n for n in range(longest, 0, -1) if self._buffer.endswith(OPEN[:n]))
        return len(self._buffer) - next(ends, 0)

    @staticmethod
    def _text(text: str) -> Iterator[str]:
        if text:
            yield text

    def _call(self, block: str) -> ParsedCall | None:
        try:
            call = json.loads(block[len(OPEN) : -len(CLOSE)])
        except ValueError:
            return None
        match call:
            case {"name": str(name), "arguments": dict()} if name in self.names:
                return ParsedCall(name, json.dumps(call["arguments"], ensure_ascii=False))
            case _:
                return None
