"""What a client wants its answer to keep to, as a grammar.

OpenAI says it in ``response_format``, vLLM in ``structured_outputs`` and, before its release 0.12,
in ``guided_*``: all are read, as a client that sends one of them would not expect to be ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from triptych.core import grammar
from triptych.core.errors import GrammarError, RequestError
from triptych.deployments.http.openai.protocol import (
    GenerationBody,
    ResponseFormat,
    StructuredOutputs,
)

ANY_OBJECT: dict[str, object] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Wish:
    """One field that says what the answer is to be."""

    param: str
    schema: dict[str, object] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    lark: str | None = None

    def grammar(self) -> str:
        """Takes milliseconds. Raises: RequestError naming the field"""
        try:
            return self._made()
        except GrammarError as error:
            raise RequestError(f"{self.param}: {error}", self.param) from error

    def _made(self) -> str:
        if self.schema is not None:
            return grammar.from_json_schema(self.schema)
        if self.regex is not None:
            return grammar.from_regex(self.regex)
        if self.choice is not None:
            return grammar.from_choices(self.choice)
        return grammar.from_lark(self.lark or "")


def is_structured(body: GenerationBody) -> bool:
    """Whether a client says what its answer is to keep to.

    Raises: RequestError naming the field that does not say it well
    """
    return any(True for _ in _wishes(body))


def grammar_of(body: GenerationBody) -> str:
    """The grammar of a request; empty if its answer may be anything. Takes milliseconds.

    Raises: RequestError naming the field
    """
    wishes = list(_wishes(body))
    if not wishes:
        return ""
    if len(wishes) > 1:
        names = " and ".join(wish.param for wish in wishes)
        text = f"{names} all say what the answer is to be: send one"
        raise RequestError(text, wishes[1].param.partition(".")[0])
    check_own_end(body, "a structured answer")
    return wishes[0].grammar()


def check_own_end(body: GenerationBody, what: str) -> None:
    """Refuse what would have an answer go on behind the end of its grammar.

    Raises: RequestError naming the field
    """
    for name, is_set in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens > 0)):
        if is_set:
            raise RequestError(f"{name}: {what} ends when it is complete; leave {name} out", name)


def _wishes(body: GenerationBody) -> Iterator[Wish]:
    if body.response_format is not None:
        yield from _of_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _of_outputs(body.structured_outputs)
    if body.guided_json is not None:
        yield Wish("guided_json", schema=body.guided_json)
    if body.guided_regex is not None:
        yield Wish("guided_regex", regex=body.guided_regex)
    if body.guided_choice is not None:
        yield Wish("guided_choice", choice=body.guided_choice)
    if body.guided_grammar is not None:
        yield Wish("guided_grammar", lark=body.guided_grammar)


def _of_format(wanted: ResponseFormat) -> Iterator[Wish]:
    param = "response_format"
    match wanted:
        case ResponseFormat(type="text"):
            return
        case ResponseFormat(type="json_object"):
            yield Wish(param, schema=ANY_OBJECT)
        case ResponseFormat(type="json_schema", json_schema=wrapped) if wrapped is not None:
            yield Wish(f"{param}.json_schema.schema", schema=wrapped.json_schema)
        case ResponseFormat(type="regex", pattern=str(pattern)):
            yield Wish(f"{param}.pattern", regex=pattern)
        case ResponseFormat(type="grammar", grammar=str(rules)):
            yield Wish(f"{param}.grammar", lark=rules)
        case _:
            missing = "pattern" if wanted.type == "regex" else wanted.type
            raise RequestError(f"type {wanted.type} needs a {missing}", f"{param}.{missing}")


def _of_outputs(wanted: StructuredOutputs) -> Iterator[Wish]:
    param = "structured_outputs"
    if len(wanted.model_fields_set) != 1:
        raise RequestError("expected one of json, json_object, regex, choice, grammar", param)
    match wanted:
        case StructuredOutputs(json_schema=dict(schema)):
            yield Wish(f"{param}.json", schema=schema)
        case StructuredOutputs(regex=str(pattern)):
            yield Wish(f"{param}.regex", regex=pattern)
        case StructuredOutputs(choice=list(choices)):
            yield Wish(f"{param}.choice", choice=choices)
        case StructuredOutputs(grammar=str(rules)):
            yield Wish(f"{param}.grammar", lark=rules)
        case StructuredOutputs(json_object=True):
            yield Wish(param, schema=ANY_OBJECT)
        case _:
            return
