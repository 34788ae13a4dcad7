"""Requests that a hostile or broken client sends: bodies, and whole connections.

Each kind has at least three examples; some are drawn from a seed, so that other seeds try others.
"""

import json
import random
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.e2e.conftest import MODEL

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]

Json = dict[str, object]


@dataclass(frozen=True)
class Hostile:
    """One request."""

    kind: str
    path: str
    body: bytes
    headers: Mapping[str, str]
    method: str = "POST"


def hostile_requests(seed: int = 0) -> list[Hostile]:
    """All of them, in a fixed order."""
    luck = random.Random(seed)
    return [one for make in KINDS for one in make(luck)]


def _chat(kind: str, **fields: object) -> Hostile:
    return _json(kind, CHAT, {"model": MODEL, "messages": QUESTION, "max_tokens": 4, **fields})


def _text(kind: str, **fields: object) -> Hostile:
    return _json(kind, TEXT, {"model": MODEL, "prompt": "Hello", "max_tokens": 4, **fields})


def _json(kind: str, path: str, body: object) -> Hostile:
    return _raw(kind, path, json.dumps(body).encode())


def _raw(kind: str, path: str, body: bytes, content_type: str = "application/json") -> Hostile:
    return Hostile(kind, path, body, {"Content-Type": content_type})


def _grammars(luck: random.Random) -> Iterator[Hostile]:
    chain = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "x"'
    yield _chat("grammar", guided_grammar=chain)
    yield _chat("grammar", guided_grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000)
    yield _chat("grammar", guided_regex="a?" * 20_000)
    yield _chat("grammar", guided_regex="((((a{1,90}){1,90}){1,90}){1,90}){1,90}")
    for _ in range(3):
        wild = "".join(luck.choices("ab(|)*+?{}[]^$.\\19,", k=luck.randint(10, 400)))
        yield _chat("grammar", guided_regex=wild)


def _schemas(luck: random.Random) -> Iterator[Hostile]:
    patterns = [f"^.*[{luck.choice('abcdef')}].{{{luck.randint(5, 90)}}}$" for _ in range(60)]
    yield _chat(
        "schema", guided_json={"allOf": [{"type": "string", "pattern": one} for one in patterns]}
    )
    references: Json = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1200)}
    references["a1200"] = {"type": "null"}
    yield _chat("schema", guided_json={"$ref": "#/$defs/a0", "$defs": references})
    yield _chat("schema", guided_json={"$ref": "#"})
    yield _chat("schema", guided_json={"enum": [luck.random() for _ in range(50_000)]})
    wild = _value(luck, 6)
    yield _chat("schema", guided_json={"properties": wild})


def _tools(luck: random.Random) -> Iterator[Hostile]:
    def tool(name: str, parameters: object) -> Json:
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    yield _chat("tools", tools=[tool(f"f{i}", {"type": "object"}) for i in range(5000)])
    yield _chat("tools", tools=[tool("f", {"$ref": "#"})], tool_choice="required")
    yield _chat("tools", tools=[tool("\ud800", {"type": "object"})])
    yield _chat("tools", tools=[tool("f", {"pattern": "\udfff" * 9, "type": "string"})])
    yield _chat("tools", tools=[tool("f" * 100_000, {"type": "object"})])
    yield _chat("tools", tools=[tool("f", _value(luck, 7))])


def _wrong_types(luck: random.Random) -> Iterator[Hostile]:
    parts: list[object] = [[]] * 400_000
    yield _chat("types", messages=[{"role": "user", "content": parts}])
    yield _chat("types", messages=[1] * 400_000)
    wrong: list[Json] = [{"role": luck.random(), "content": None} for _ in range(30_000)]
    yield _chat("types", messages=wrong)
    yield _text("types", prompt=[[None] * 10 for _ in range(30_000)])
    for _ in range(3):
        yield _json("types", luck.choice((CHAT, TEXT)), _value(luck, 5))


def _nesting(luck: random.Random) -> Iterator[Hostile]:
    for depth in (900, 100_000, 2_000_000):
        yield _raw("nesting", CHAT, b"[" * depth)
    yield _raw("nesting", CHAT, b'{"messages":' * 100_000 + b"1" + b"}" * 100_000)
    deep = "[" * luck.randint(500, 990)
    yield _raw("nesting", TEXT, f'{{"prompt": "a", "metadata": {deep}{"]" * len(deep)}}}'.encode())


def _long_texts(luck: random.Random) -> Iterator[Hostile]:
    yield _chat("length", messages=[{"role": "user", "content": "word " * 200_000}])
    yield _text("length", prompt="a" * 3_000_000)
    yield _text("length", prompt=["Hello"] * 1024)
    yield _text("length", prompt=[luck.randrange(49_152) for _ in range(300_000)])
    yield _text("length", prompt=[[luck.randrange(49_152)] * 500 for _ in range(300)])
    wild = "".join(chr(luck.choice((0x41, 0x1F98A, 0x0301, 0x202E, 0x10FFFF))) for _ in range(9000))
    yield _text("length", prompt=wild)


def _choices(luck: random.Random) -> Iterator[Hostile]:
    bias = {str(i): luck.uniform(-100, 100) for i in range(480)}
    yield _text("choices", n=256, logit_bias=bias)
    yield _text("choices", n=8, prompt=["Hello"] * 256, logit_bias=bias)
    yield _text("choices", n=10**9)
    yield _text("choices", n=2, best_of=10**6)


def _stops(luck: random.Random) -> Iterator[Hostile]:
    yield _chat("stops", stop=["x"] * 100_000)
    yield _chat("stops", stop=["a" * 1_000_000])
    yield _chat("stops", stop_token_ids=[luck.randrange(49_152) for _ in range(200_000)])
    yield _chat("stops", stop=[""])


def _numbers(luck: random.Random) -> Iterator[Hostile]:
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "seed")
    for name in names:
        yield _raw("numbers", CHAT, _with_number(name, luck.choice(("1e400", "-1e400", "NaN"))))
    yield _chat("numbers", repetition_penalty=1e-300)
    yield _chat("numbers", frequency_penalty=2.0, temperature=1e-300)
    yield _chat("numbers", max_tokens=10**40)
    yield _chat("numbers", logit_bias={"5\nERROR forged": 1})
    yield _chat("numbers", logit_bias={"7": 1e308})
    yield _raw("numbers", CHAT, _with_number("seed", "9" * 6000))


def _with_number(name: str, digits: str) -> bytes:
    body = json.dumps({"model": MODEL, "messages": QUESTION, "max_tokens": 4})
    return f'{body[:-1]}, "{name}": {digits}}}'.encode()


def _strings(luck: random.Random) -> Iterator[Hostile]:
    yield _chat("strings", messages=[{"role": "user", "content": "\ud83d lonely"}])
    yield _chat("strings", user="\x00" * 1000, session_id="\n\r" * 100, cache_salt="\udfff")
    yield _chat("strings", model="x" * 1_000_000)
    yield _text("strings", prompt="<|im_end|>" * 300, stop="\ufffd")
    name = "".join(luck.choices(string.printable, k=300))
    yield _chat("strings", **{name: name})


def _bodies(luck: random.Random) -> Iterator[Hostile]:
    yield _raw("bodies", CHAT, b"")
    yield _raw("bodies", CHAT, b"\xff\xfe\x00" * 100)
    yield _raw("bodies", CHAT, luck.randbytes(10_000))
    yield _raw("bodies", CHAT, b'{"messages": [' + b" " * 6_000_000)
    yield _raw("bodies", TEXT, b"prompt=Hello", "application/x-www-form-urlencoded")
    yield Hostile("bodies", CHAT, b"{}", {"Content-Type": "application/json", "X": "y" * 60_000})
    yield Hostile("bodies", CHAT, b"{}", {"Content-Encoding": "gzip"})


def _paths(luck: random.Random) -> Iterator[Hostile]:
    yield Hostile("paths", "/../../etc/passwd", b"", {}, "GET")
    yield Hostile("paths", "/v1/models/" + "%2e%2e%2f" * 100, b"", {}, "GET")
    yield Hostile("paths", "/router/explain/" + "a" * 5000, b"", {}, "GET")
    yield Hostile("paths", CHAT, b"", {}, luck.choice(("PUT", "DELETE", "TRACE", "FOO")))


def _value(luck: random.Random, depth: int) -> object:
    """A random JSON value."""
    kind = luck.randrange(8 if depth else 5)
    if kind >= 5:
        count = luck.randint(0, 6)
        if kind == 5:
            return [_value(luck, depth - 1) for _ in range(count)]
        keys = ("type", "properties", "items", "$ref", "messages", "prompt", "role", "content", "n")
        return {luck.choice(keys): _value(luck, depth - 1) for _ in range(count)}
    wild = (None, luck.random() < 0.5, luck.randint(-(2**70), 2**70), luck.uniform(-1e300, 1e300))
    return (
        wild[kind] if kind < 4 else "".join(luck.choices(string.printable, k=luck.randint(0, 60)))
    )


KINDS: tuple[Callable[[random.Random], Iterator[Hostile]], ...] = (
    _grammars,
    _schemas,
    _tools,
    _wrong_types,
    _nesting,
    _long_texts,
    _choices,
    _stops,
    _numbers,
    _strings,
    _bodies,
    _paths,
)
