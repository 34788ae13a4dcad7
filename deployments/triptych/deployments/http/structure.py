"""What a client wants its answer to keep to, as a grammar."""

from collections.abc import Callable
from typing import TypeVar

from triptych.core import grammar
from triptych.core.errors import GrammarError, RequestError
from triptych.deployments.http.protocol import GenerationBody, ResponseFormat, StructuredOutputs

T = TypeVar("T")

ANY_OBJECT: dict[str, object] = {"type": "object"}


def is_structured(body: GenerationBody) -> bool:
    """Whether a client says what its answer is to keep to."""
    return body.response_format is not None or body.structured_outputs is not None


def grammar_of(body: GenerationBody) -> str:
    """The grammar of a request; empty if its answer may be anything. Takes milliseconds.

    Raises: RequestError naming the field
    """
    wanted = (_of_format(body.response_format), _of_outputs(body.structured_outputs))
    if all(wanted):
        text = "response_format and structured_outputs both say what the answer is to be: send one"
        raise RequestError(text, "structured_outputs")
    grammar = wanted[0] or wanted[1]
    if grammar:
        check_own_end(body, "a structured answer")
    return grammar


def check_own_end(body: GenerationBody, what: str) -> None:
    """Refuse what would have an answer go on behind the end of its grammar.

    Raises: RequestError naming the field
    """
    for name, is_set in (("ignore_eos", body.ignore_eos), ("min_tokens", body.min_tokens > 0)):
        if is_set:
            raise RequestError(f"{name}: {what} ends when it is complete; leave {name} out", name)


def _of_format(wanted: ResponseFormat | None) -> str:
    param = "response_format"
    match wanted:
        case ResponseFormat(type="json_object"):
            return grammar.of_schema(ANY_OBJECT)
        case ResponseFormat(type="json_schema", json_schema=None):
            raise RequestError("type json_schema needs a json_schema", f"{param}.json_schema")
        case ResponseFormat(type="json_schema", json_schema=wrapped) if wrapped is not None:
            return _made(grammar.of_schema, wrapped.json_schema, f"{param}.json_schema.schema")
        case _:
            return ""


def _of_outputs(wanted: StructuredOutputs | None) -> str:
    param = "structured_outputs"
    if wanted is None:
        return ""
    if len(wanted.model_fields_set) != 1:
        raise RequestError("expected one of json, json_object, regex, choice, grammar", param)
    match wanted:
        case StructuredOutputs(json_schema=dict() as schema):
            return _made(grammar.of_schema, schema, f"{param}.json")
        case StructuredOutputs(regex=str() as pattern):
            return _made(grammar.of_regex, pattern, f"{param}.regex")
        case StructuredOutputs(choice=list() as choices):
            return _made(grammar.of_choice, choices, f"{param}.choice")
        case StructuredOutputs(grammar=str() as rules):
            return _made(grammar.of_lark, rules, f"{param}.grammar")
        case _:
            return grammar.of_schema(ANY_OBJECT) if wanted.json_object else ""


def _made(make: Callable[[T], str], wanted: T, param: str) -> str:
    try:
        return make(wanted)
    except GrammarError as error:
        raise RequestError(f"{param}: {error}", param) from error
