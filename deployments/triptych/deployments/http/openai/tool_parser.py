"""Tool calls: how tools are told to a model, how its answer is kept to them, and how it is read.

The notation is that of Hermes and Qwen: tools stand in the system's turn, a call is JSON between
``<tool_call>`` and ``</tool_call>``, a result comes back between ``<tool_response>`` tags. Models
that were trained on it need no more; with any other one the grammar sees to it that a call has the
form, the name and the arguments that it must have.
"""

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from triptych.core import grammar
from triptych.core.errors import GrammarError, RequestError, Unsupported
from triptych.deployments.http.openai.guided_decoding import check_own_end, is_structured
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
class Call:
    """A tool that the model wants to be called."""

    name: str
    arguments: str
    """JSON."""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


# ---------------------------------------------------------------- what a client asks for


def tools_of(body: ChatBody) -> list[Tool]:
    """The tools that the answer may call.

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
    if is_structured(body):
        raise Unsupported("tools together with a structured answer", "tools")
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in body.tools if tool.function.name == choice.function.name]
        if not chosen:
            text = f"no tool is called {choice.function.name!r}: expected one of {sorted(names)}"
            raise RequestError(text, "tool_choice.function.name")
        return chosen
    return list(body.tools)


def must_call(body: ChatBody) -> bool:
    """Whether the answer has to be a call."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


# ---------------------------------------------------------------- what the model is told


def turns_of(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Turn]:
    """Messages as turns of role and text, with tools, calls and results written into them.

    Raises: RequestError if a result answers no call
    """
    turns, open_calls = list[Turn](), set[str]()
    for index, message in enumerate(messages):
        turn = message.for_template()
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                text = f"tool_call_id {message.tool_call_id!r} answers no call before it"
                raise RequestError(text, f"messages.{index}.tool_call_id")
            turn = {"role": "user", "content": RESULT.format(message.text)}
            if index and messages[index - 1].role == "tool":  # results of one turn stand together
                turns[-1]["content"] += "\n" + turn["content"]
                continue
        said = message.tool_calls if message.role == "assistant" else []
        calls = [_written(call.function.name, call.function.arguments) for call in said]
        open_calls |= {call.id for call in said}
        turn["content"] = "\n".join([turn["content"]] * bool(turn["content"]) + calls)
        turns.append(turn)
    return _with_tools(turns, tools) if tools else turns


def _written(name: str, arguments: str) -> str:
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CLOSE}'


def _with_tools(turns: list[Turn], tools: Sequence[Tool]) -> list[Turn]:
    told = INSTRUCTIONS.format("\n".join(_signature(tool) for tool in tools))
    if turns[0]["role"] != "system":
        return [{"role": "system", "content": told}, *turns]
    first = {**turns[0], "content": f"{turns[0]['content']}\n\n{told}"}
    return [first, *turns[1:]]


def _signature(tool: Tool) -> str:
    function = tool.function
    told = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters or ANY_ARGUMENTS,
    }
    return json.dumps({"type": "function", "function": told}, ensure_ascii=False)


# ---------------------------------------------------------------- what the answer keeps to


def grammar_of(body: ChatBody, tools: Sequence[Tool]) -> str:
    """Calls with arguments that fit their tools; text, too, unless a call must come.

    Raises: RequestError naming the tool whose parameters cannot be kept to, or a field that
        tools rule out
    """
    check_own_end(body, "an answer that may call tools")
    places = {tool.function.name: index for index, tool in enumerate(body.tools)}
    calls = [_body(tool, f"tools.{places[tool.function.name]}") for tool in tools]
    once = not body.parallel_tool_calls or isinstance(body.tool_choice, NamedTool)
    if must_call(body):
        start = "call" if once else 'call ("\\n" call)*'
        rules = [f"start: {start}", f'call: "{OPEN}" body']
    else:
        rules = [
            f"start: (found body){'?' if once else '*'} TEXT",
            f'found[lazy]: TEXT "{OPEN}"',
            "TEXT: /(.|\\n)*/",
        ]
    rules.append(f'body: "\\n" ({" | ".join(f"({call})" for call in calls)}) "\\n{CLOSE}"')
    return _made("\n".join(rules), "tools")


def _body(tool: Tool, param: str) -> str:
    function = tool.function
    schema = function.parameters or ANY_ARGUMENTS
    try:
        grammar.from_json_schema(schema)
    except GrammarError as error:
        if function.strict:
            raise RequestError(f"{error}", f"{param}.function.parameters") from error
        schema = ANY_ARGUMENTS
    head = json.dumps(f'{{"name": {json.dumps(function.name)}, "arguments": ')
    return f'{head} %json {json.dumps(schema)} "}}"'


def _made(rules: str, param: str) -> str:
    try:
        return grammar.from_lark(rules)
    except GrammarError as error:
        raise RequestError(f"{error}", param) from error


# ---------------------------------------------------------------- what the answer says


@dataclass
class Reader:
    """Tells calls from text while an answer comes in pieces."""

    names: frozenset[str]
    _held: str = ""
    """What may be a call, or the beginning of one."""

    def read(self, text: str, *, is_last: bool = False) -> Iterator[str | Call]:
        """What the next piece adds: text, and calls once they are whole.

        What looks like a call and is none is text.
        """
        self._held += text
        while (found := self._held.find(OPEN)) >= 0:
            end = self._held.find(CLOSE, found)
            if end < 0:
                break
            yield from self._text(self._held[:found])
            block = self._held[found : end + len(CLOSE)]
            self._held = self._held[end + len(CLOSE) :]
            yield self._call(block) or block
        keep = len(self._held) if is_last else self._free(found)
        yield from self._text(self._held[:keep])
        self._held = self._held[keep:]

    def _free(self, found: int) -> int:
        """How many characters cannot be part of a call any more."""
        if found >= 0:
            return found
        longest = min(len(OPEN) - 1, len(self._held))
        ends = (n for n in range(longest, 0, -1) if self._held.endswith(OPEN[:n]))
        return len(self._held) - next(ends, 0)

    @staticmethod
    def _text(text: str) -> Iterator[str]:
        if text:
            yield text

    def _call(self, block: str) -> Call | None:
        try:
            said = json.loads(block[len(OPEN) : -len(CLOSE)])
        except ValueError:
            return None
        match said:
            case {"name": str(name), "arguments": dict()} if name in self.names:
                return Call(name, json.dumps(said["arguments"], ensure_ascii=False))
            case _:
                return None
