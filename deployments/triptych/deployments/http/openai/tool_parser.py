"""Tool calls: tools in the prompt, a grammar for the output, and a parser of calls.

A template that writes calls as Hermes, Llama 3 or Mistral do keeps its format. For other models it
is that of Hermes and Qwen: tools are listed in the system message, a call is JSON between
``<tool_call>`` and ``</tool_call>``, a result is between ``<tool_response>`` tags. The grammar
enforces the form, name and arguments of a call.
"""

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import sha256
from typing import Protocol

from triptych.core.errors import GrammarError, RequestError
from triptych.core.grammar import GrammarSource, bounded_schema, schema_source
from triptych.core.messages import FinishReason
from triptych.deployments.grammars import GrammarCompiler
from triptych.deployments.http.openai import named_calls
from triptych.deployments.http.openai.guided_decoding import OutputConstraint, check_own_end
from triptych.deployments.http.openai.named_calls import NamedCallScanner
from triptych.deployments.http.openai.protocol import ChatBody, Message, NamedTool, Tool
from triptych.deployments.http.openai.reasoning_parser import Thinking, after_thinking
from triptych.workers.sampling.tool_calls import CLOSE, OPEN, OPEN_CALLS, Segment, ToolCallScanner

RESULT = "<tool_response>\n{}\n</tool_response>"
RESULT_ROLES = ("tool", "function")
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

ID_LETTERS = 9
"""Letters and digits of an id in Mistral's templates."""

Turn = dict[str, object]


class ToolFormat(Enum):
    """How calls are written in an output."""

    TAGS = "tags"
    """JSON between tags, anywhere in the text: Hermes and Qwen."""
    OBJECT = "object"
    """The whole output is one JSON object: Llama 3."""
    ARRAY = "array"
    """The whole output is ``[TOOL_CALLS]`` and a JSON array: Mistral up to version 7."""
    NAMED = "named"
    """Text, and then ``[TOOL_CALLS]name[ARGS]`` and a JSON object for each call: Mistral from
    version 11 on."""

    @property
    def has_short_ids(self) -> bool:
        """Whether templates take ids of nine letters and digits only."""
        return self in (ToolFormat.ARRAY, ToolFormat.NAMED)

    @property
    def shows_special_tokens(self) -> bool:
        """Whether the tags of calls are special tokens without which they cannot be read."""
        return self is ToolFormat.NAMED

    @property
    def arguments_key(self) -> str:
        return "parameters" if self is ToolFormat.OBJECT else "arguments"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call in the output."""

    name: str
    arguments: str
    """JSON."""
    id: str

    @classmethod
    def new(cls, name: str, arguments: str, form: ToolFormat) -> "ParsedCall":
        """A call with an id of its own."""
        number = uuid.uuid4().hex
        return cls(
            name, arguments, number[:ID_LETTERS] if form.has_short_ids else f"call_{number[:24]}"
        )


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


def calls_come_first(body: ChatBody, constraint: OutputConstraint | None) -> bool:
    """Whether output that does not begin with a call has none, so its tags are text.

    ``constraint``: what the answer must be, if there is no call. Its strings can hold any text.
    """
    return must_call(body) or constraint is not None


# ---------------------------------------------------------------- prompt


def turns_of(
    messages: Sequence[Message], tools: Sequence[Tool], native: ToolFormat | None = None
) -> list[Turn]:
    """Messages for the chat template.

    ``native``: how the template writes calls, if it lists tools and writes calls and results
    itself; None: they are formatted into the text of messages.

    Raises: RequestError if a result belongs to no call
    """
    _check_results(messages)
    if native is not None:
        return [_native_turn(message, native) for message in messages]
    turns = list[Turn]()
    for index, message in enumerate(messages):
        turn: Turn = dict(message.for_template())
        if message.role in RESULT_ROLES:
            turn = {"role": "user", "content": RESULT.format(message.text)}
            if index and messages[index - 1].role in RESULT_ROLES:
                # Results of one turn become one message.
                turns[-1]["content"] = f"{turns[-1]['content']}\n{turn['content']}"
                continue
        calls = [_call_text(call.name, call.arguments) for call in message.calls]
        turn["content"] = (
            "\n".join([message.text] * bool(message.text) + calls) if calls else (turn["content"])
        )
        turns.append(turn)
    return _with_tools(turns, tools) if tools else turns


def _native_turn(message: Message, form: ToolFormat) -> Turn:
    turn: Turn = dict(message.for_template())
    if message.role in RESULT_ROLES:
        return turn | {"role": "tool", "tool_call_id": _native_id(message.tool_call_id, form)}
    ids = [call.id for call in message.tool_calls] or [""]
    calls = [
        {
            "type": "function",
            "id": _native_id(call_id, form),
            "function": {"name": call.name, "arguments": json.loads(call.arguments)},
        }
        for call_id, call in zip(ids, message.calls, strict=False)
    ]
    return turn | {"tool_calls": calls} if calls else turn


def _native_id(call_id: str | None, form: ToolFormat) -> str | None:
    """An id as templates take it; that of another server becomes one of nine letters."""
    if not form.has_short_ids or re.fullmatch(f"[a-zA-Z0-9]{{{ID_LETTERS}}}", call_id or ""):
        return call_id
    return sha256((call_id or "").encode()).hexdigest()[:ID_LETTERS]


def signature_of(tool: Tool) -> dict[str, object]:
    """A tool as chat templates list it."""
    function = tool.function
    signature = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters or ANY_ARGUMENTS,
    }
    return {"type": "function", "function": signature}


def _check_results(messages: Sequence[Message]) -> None:
    """Raises: RequestError if a result belongs to no call"""
    open_calls = set[str]()
    for index, message in enumerate(messages):
        if message.role == "tool" and not _answers(message.tool_call_id, open_calls):
            text = f"tool_call_id {message.tool_call_id!r} answers no call before it"
            raise RequestError(text, f"messages.{index}.tool_call_id")
        open_calls |= {call.id for call in message.tool_calls if message.role == "assistant"}


def _answers(call_id: str, open_calls: AbstractSet[str]) -> bool:
    """Whether a result belongs to a call; some clients leave the ids empty."""
    return call_id in open_calls or (bool(open_calls) and (not call_id or "" in open_calls))


def _call_text(name: str, arguments: str) -> str:
    return f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{CLOSE}'


def _with_tools(turns: list[Turn], tools: Sequence[Tool]) -> list[Turn]:
    instructions = INSTRUCTIONS.format("\n".join(_signature(tool) for tool in tools))
    if turns[0]["role"] != "system":
        return [{"role": "system", "content": instructions}, *turns]
    first = {**turns[0], "content": f"{turns[0]['content']}\n\n{instructions}"}
    return [first, *turns[1:]]


def _signature(tool: Tool) -> str:
    return json.dumps(signature_of(tool), ensure_ascii=False)


# ---------------------------------------------------------------- grammar of the output


async def grammar_of(
    body: ChatBody,
    tools: Sequence[Tool],
    compiler: GrammarCompiler,
    constraint: OutputConstraint | None = None,
    thinking: Thinking = Thinking.NO,
    form: ToolFormat = ToolFormat.TAGS,
) -> str:
    """The grammar of calls with valid arguments, and of text unless a call is required.

    ``constraint``: what the answer must be, if there is no call. Then, and if a call is required,
    calls stand only at the beginning (``calls_come_first``).

    Raises: RequestError naming a tool whose parameters have no grammar, or a field that tools
        exclude; Overloaded
    """
    check_own_end(body, "an answer that may call tools")
    places = {tool.function.name: index for index, tool in enumerate(body.tools)}
    schemas = [
        (tool.function.name, await _schema(tool, f"tools.{places[tool.function.name]}", compiler))
        for tool in tools
    ]
    rules = _rules(body, schemas, form)
    # Reasoning that may come is text as well.
    is_free = not calls_come_first(body, constraint)
    begin = Thinking.NO if is_free and thinking is Thinking.MAYBE else thinking
    if must_call(body):
        rules += after_thinking(begin, "calls")
    elif constraint is not None:
        rules += [*after_thinking(begin, "calls | answer"), f"answer: {constraint.rule()}"]
    else:
        rules += after_thinking(begin, "free")
    try:
        return await compiler.compile(GrammarSource("lark", "\n".join(rules)))
    except GrammarError as error:
        raise RequestError(f"tools: {error}", "tools") from error


def _rules(body: ChatBody, schemas: Sequence[tuple[str, str]], form: ToolFormat) -> list[str]:
    """Rules ``calls``, at the beginning of an output, and ``free``, of any output.

    ``schemas``: name and schema of the parameters of each tool, in JSON.
    """
    # One call ends the answer: text after it could hold another one.
    once = not body.parallel_tool_calls or isinstance(body.tool_choice, NamedTool)
    bodies = [f'({json.dumps(_head(name, form))} %json {schema} "}}")' for name, schema in schemas]
    match form:
        case ToolFormat.NAMED:
            return named_calls.rules(schemas, once=once)
        case ToolFormat.TAGS:
            return _tag_rules(bodies, once=once)
        case ToolFormat.OBJECT:
            return _object_rules(bodies)
        case ToolFormat.ARRAY:
            return _array_rules(bodies, once=once)


def _tag_rules(bodies: Sequence[str], *, once: bool) -> list[str]:
    """Calls between tags, anywhere in a text."""
    return [
        f'body: "\\n" ({" | ".join(bodies)}) "\\n{CLOSE}"',
        f"calls: {'call' if once else 'call (CALL_GAP call)*'}",
        f'call: "{OPEN}" body',
        'CALL_GAP: "\\n"',
        f"free: {'TEXT | found body' if once else '(found body)* TEXT'}",
        f'found[lazy]: TEXT "{OPEN}"',
        "TEXT: /(.|\\n)*/",
    ]


def _object_rules(bodies: Sequence[str]) -> list[str]:
    """The whole output is one call, or a text that begins otherwise."""
    return [f"calls: {' | '.join(bodies)}", "free: calls | TEXT", f"TEXT: {_text_without('{')}"]


def _array_rules(bodies: Sequence[str], *, once: bool) -> list[str]:
    """The whole output is an array of calls, or a text that begins otherwise."""
    return [
        f'calls: "{OPEN_CALLS}"? " "? "[" {"call" if once else "call (CALL_GAP call)*"} "]"',
        f"call: {' | '.join(bodies)}",
        'CALL_GAP: "," " "?',
        "free: calls | TEXT",
        f"TEXT: {_text_without('[')} & ~/(.|\\n)*{re.escape(OPEN_CALLS)}(.|\\n)*/",
    ]


def _text_without(opening: str) -> str:
    """Any text whose first character that is no white space is not the one that opens a call."""
    return f"/\\s*([^\\s{re.escape(opening)}](.|\\n)*)?/"


async def _schema(tool: Tool, param: str, compiler: GrammarCompiler) -> str:
    """The schema of a tool's parameters in JSON; that of any object if it has no grammar.

    Raises: RequestError if it has none and the tool is strict
    """
    function = tool.function
    schema = function.parameters or ANY_ARGUMENTS
    try:
        await compiler.compile(schema_source(schema))
    except GrammarError as error:
        if function.strict:
            raise RequestError(f"{error}", f"{param}.function.parameters") from error
        schema = ANY_ARGUMENTS
    return json.dumps(bounded_schema(schema))


def _head(name: str, form: ToolFormat) -> str:
    """How a call begins, up to its arguments."""
    return f'{{"name": {json.dumps(name)}, "{form.arguments_key}": '


# ---------------------------------------------------------------- parser of the output


class CallParser(Protocol):
    """Separates tool calls from text in streamed output."""

    @property
    def calls(self) -> int:
        """Complete calls so far."""
        ...

    @property
    def is_cut(self) -> bool:
        """Whether the output ended inside a call."""
        ...

    def read(self, text: str, *, finish: FinishReason | None = None) -> Iterator[str | ParsedCall]:
        """Parse the next piece: yields text, and calls when they are complete."""
        ...


def call_parser(names: frozenset[str], form: ToolFormat, *, calls_first: bool) -> CallParser:
    """A parser of one output."""
    if form is ToolFormat.TAGS:
        return ToolParser(names, calls_first=calls_first)
    return NamedCallParser(names) if form is ToolFormat.NAMED else WholeCallParser(names, form)


@dataclass
class WholeCallParser:
    """Parses an output that is calls as a whole, or text.

    It is a call if it begins as the grammar writes calls; nothing of a call becomes text.
    """

    names: frozenset[str]
    form: ToolFormat
    calls: int = 0
    is_cut: bool = False
    _held: str = ""
    """The output so far, while it is or may become a call."""
    _is_text: bool = False

    def read(self, text: str, *, finish: FinishReason | None = None) -> Iterator[str | ParsedCall]:
        """Parse the next piece."""
        if self._is_text:
            if text:
                yield text
            return
        self._held += text
        start = self._held.lstrip()
        begins = self._begins()
        is_call = any(start.startswith(begin) for begin in begins)
        may_call = is_call or any(begin.startswith(start) for begin in begins)
        if not may_call or (finish == "stop" and not is_call):
            self._is_text = True
            held, self._held = self._held, ""
            if held:
                yield held
        elif finish:
            calls = self._parse(start)
            self.calls, self.is_cut = len(calls), not calls and bool(start)
            yield from calls

    def _begins(self) -> list[str]:
        """How outputs with a call begin."""
        heads = [_head(name, self.form) for name in self.names]
        if self.form is ToolFormat.OBJECT:
            return heads
        opens = (f"{OPEN_CALLS}{gap}[" for gap in ("", " "))
        return [before + head for before in ("[", *opens) for head in heads]

    def _parse(self, text: str) -> list[ParsedCall]:
        if self.form is ToolFormat.OBJECT:
            call = parse_call(text, self.names, self.form)
            return [call] if call else []
        return parse_calls(text.removeprefix(OPEN_CALLS), self.names)


@dataclass
class NamedCallParser:
    """Parses text that calls with tags of their own may follow (``named_calls``)."""

    names: frozenset[str]
    calls: int = 0
    _scanner: NamedCallScanner = field(default_factory=NamedCallScanner)

    @property
    def is_cut(self) -> bool:
        """Whether the output ended inside a call."""
        return self._scanner.is_cut

    def read(self, text: str, *, finish: FinishReason | None = None) -> Iterator[str | ParsedCall]:
        """Parse the next piece; a call of no tool is dropped."""
        for found in self._scanner.read(text, finish=finish):
            if isinstance(found, str):
                yield found
                continue
            name, arguments, call_id = found
            if name in self.names:
                self.calls += 1
                call = ParsedCall.new(name, arguments, ToolFormat.NAMED)
                yield replace(call, id=call_id) if call_id else call


@dataclass
class ToolParser:
    """Separates tool calls from text in streamed output.

    All splits of an output into pieces give the same text and calls. Tags never become text: a
    call that the end of the output cuts is dropped, and a block that is no valid call loses its
    tags. White space between a call and the beginning or the end of the text is dropped.
    """

    names: frozenset[str]
    calls_first: bool = False
    """Whether output that does not begin with a call is text, tags included."""
    calls: int = 0
    """Complete calls so far."""
    is_cut: bool = False
    """Whether the output ended inside a call."""
    _scanner: ToolCallScanner = field(init=False)
    _call: list[str] = field(default_factory=list[str])
    """The pieces of the call that is not complete yet."""
    _has_text: bool = False
    _space: str = ""
    """White space that is text only if more text follows."""

    def __post_init__(self) -> None:
        self._scanner = ToolCallScanner(calls_first=self.calls_first)

    def read(self, text: str, *, finish: FinishReason | None = None) -> Iterator[str | ParsedCall]:
        """Parse the next piece: yields text, and calls when they are complete."""
        for segment in self._scanner.push(text):
            yield from self._segment(segment)
        if finish:
            yield from self._end(finish)

    def _segment(self, segment: Segment) -> Iterator[str | ParsedCall]:
        if not segment.in_call:
            yield from self._text(segment.text)
            return
        self._call.append(segment.text)
        if segment.ends_call:
            block = "".join(self._call)[len(OPEN) : -len(CLOSE)]
            self._call.clear()
            if call := parse_call(block, self.names):
                self.calls += 1
                yield call
            else:
                yield from self._text(block.replace(OPEN, ""))

    def _end(self, finish: FinishReason) -> Iterator[str]:
        self.is_cut = self._scanner.in_call
        rest = self._scanner.flush()
        if rest and not rest.in_call:
            # It may begin a tag. Only the end of a complete answer shows that it does not.
            if finish == "stop":
                yield from self._text(rest.text)
            else:
                self.is_cut = True
        if self._space and not (self.calls or self.is_cut):
            yield self._space
        self._space = ""

    def _text(self, text: str) -> Iterator[str]:
        kept = text.rstrip()
        if not kept:
            self._space += text
            return
        yield kept.lstrip() if self.calls and not self._has_text else self._space + kept
        self._has_text, self._space = True, text[len(kept) :]


def parse_call(
    block: str, names: frozenset[str], form: ToolFormat = ToolFormat.TAGS
) -> ParsedCall | None:
    """The call in a JSON object; None if it is not a call of one of these tools.

    Arguments keep the model's text, so numbers have all their digits.
    """
    try:
        call = json.loads(block, parse_int=_number)
    except (ValueError, RecursionError):
        return None
    key = form.arguments_key
    match call:
        case {"name": str(name)} if name in names and isinstance(call.get(key), dict):
            return ParsedCall.new(name, _arguments_text(block) or json.dumps(call[key]), form)
        case _:
            return None


def parse_calls(block: str, names: frozenset[str]) -> list[ParsedCall]:
    """The calls of a JSON array; none if one of them is not a call of one of these tools."""
    decoder, calls = json.JSONDecoder(parse_int=_number), list[ParsedCall]()
    text = block.strip()
    at = 1 if text.startswith("[") else len(text)
    while gap := _GAP.match(text, at):
        if text[gap.end() :] == "]":
            return calls
        try:
            _, at = decoder.raw_decode(text, gap.end())
        except (ValueError, RecursionError):
            return []
        call = parse_call(text[gap.end() : at], names, ToolFormat.ARRAY)
        if call is None:
            return []
        calls.append(call)
    return []


_GAP = re.compile(r"[,\s]*")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"[^"\\]*"\s*,\s*"(?:arguments|parameters)"\s*:\s*')


def _arguments_text(block: str) -> str:
    """The text of the arguments in a block of the form that grammars enforce; else empty."""
    head = _HEAD.match(block)
    text = block[head.end() :].rstrip()[:-1].rstrip() if head else ""
    try:
        return text if isinstance(json.loads(text, parse_int=_number), dict) else ""
    except ValueError:
        return ""


def _number(digits: str) -> int | float:
    """A number of any length; Python refuses integers of more than 4,300 digits."""
    return int(digits) if len(digits) < 1000 else float(digits)
