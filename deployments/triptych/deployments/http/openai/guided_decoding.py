"""Structured outputs: the fields that constrain the output, converted to a grammar.

OpenAI's field is ``response_format``, vLLM's ``structured_outputs`` and, before its release 0.12,
``guided_*``. All of them are accepted, since ignoring a constraint would surprise its client.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.core.errors import GrammarError, RequestError
from triptych.core.grammar import GrammarSource, bounded_schema, schema_source
from triptych.deployments.grammars import GrammarCompiler
from triptych.deployments.http.openai.protocol import (
    GenerationBody,
    ResponseFormat,
    StructuredOutputs,
)
from triptych.deployments.http.openai.reasoning_parser import Thinking, after_thinking

ANY_OBJECT: dict[str, object] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """One request field that constrains the output, with its constraint."""

    param: str
    schema: dict[str, object] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    lark: str | None = None

    async def grammar(self, compiler: GrammarCompiler, thinking: Thinking = Thinking.NO) -> str:
        """The grammar of the output, which begins after its reasoning.

        Raises: RequestError naming the field; Overloaded
        """
        try:
            source = self.source()
            if thinking is not Thinking.NO:
                rules = [*after_thinking(thinking, "answer"), f"answer: {self.rule()}"]
                source = GrammarSource("lark", "\n".join(rules))
            return await compiler.compile(source)
        except GrammarError as error:
            raise RequestError(f"{self.param}: {error}", self.param) from error

    def source(self) -> GrammarSource:
        """Raises: GrammarError"""
        if self.schema is not None:
            return schema_source(self.schema)
        if self.regex is not None:
            return GrammarSource("regex", self.regex)
        if self.choice is not None:
            return GrammarSource("choice", json.dumps(self.choice))
        return GrammarSource("lark", self.lark or "")

    def rule(self) -> str:
        """The right-hand side of a Lark rule for the constraint."""
        if self.schema is not None:
            return f"%json {json.dumps(bounded_schema(self.schema))}"
        if self.regex is not None:
            return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", self.regex) + "/"
        if self.choice is not None:
            return " | ".join(map(json.dumps, self.choice))
        return f"%lark {{\n{self.lark}\n}}"


def constraint_of(body: GenerationBody) -> OutputConstraint | None:
    """The constraint on a request's output; None: it is free.

    Raises: RequestError naming a field that is invalid, or excluded by another one
    """
    constraints = list(_constraints(body))
    if len(constraints) > 1:
        names = " and ".join(constraint.param for constraint in constraints)
        text = f"{names} all constrain the answer: send one"
        raise RequestError(text, constraints[1].param.partition(".")[0])
    if constraints:
        check_own_end(body, "a structured answer")
    return constraints[0] if constraints else None


def check_own_end(body: GenerationBody, what: str) -> None:
    """Reject a minimum length: the output ends with its grammar.

    ``ignore_eos`` is accepted and has no effect, since load generators send it with any request.

    Raises: RequestError naming the field
    """
    if body.min_tokens > 0:
        text = f"min_tokens: {what} ends when it is complete; leave min_tokens out"
        raise RequestError(text, "min_tokens")


def end_warning(body: GenerationBody, grammar: str) -> str:
    """A warning if ``ignore_eos`` has no effect because of the grammar; or empty."""
    if not (body.ignore_eos and grammar):
        return ""
    return "'ignore_eos' is ignored: a structured answer ends when it is complete"


def _constraints(body: GenerationBody) -> Iterator[OutputConstraint]:
    if body.response_format is not None:
        yield from _of_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _of_outputs(body.structured_outputs)
    if body.guided_json is not None:
        yield OutputConstraint("guided_json", schema=body.guided_json)
    if body.guided_regex is not None:
        yield OutputConstraint("guided_regex", regex=body.guided_regex)
    if body.guided_choice is not None:
        yield OutputConstraint("guided_choice", choice=body.guided_choice)
    if body.guided_grammar is not None:
        yield OutputConstraint("guided_grammar", lark=body.guided_grammar)


def _of_format(wanted: ResponseFormat) -> Iterator[OutputConstraint]:
    param = "response_format"
    match wanted:
        case ResponseFormat(type="text"):
            return
        case ResponseFormat(type="json_object"):
            yield OutputConstraint(param, schema=ANY_OBJECT)
        case ResponseFormat(type="json_schema", json_schema=wrapped) if wrapped is not None:
            yield OutputConstraint(f"{param}.json_schema.schema", schema=wrapped.json_schema)
        case ResponseFormat(type="regex", pattern=str(pattern)):
            yield OutputConstraint(f"{param}.pattern", regex=pattern)
        case ResponseFormat(type="grammar", grammar=str(rules)):
            yield OutputConstraint(f"{param}.grammar", lark=rules)
        case _:
            missing = "pattern" if wanted.type == "regex" else wanted.type
            raise RequestError(f"type {wanted.type} needs a {missing}", f"{param}.{missing}")


def _of_outputs(wanted: StructuredOutputs) -> Iterator[OutputConstraint]:
    param = "structured_outputs"
    if len(wanted.model_fields_set) != 1:
        raise RequestError("expected one of json, json_object, regex, choice, grammar", param)
    match wanted:
        case StructuredOutputs(json_schema=dict(schema)):
            yield OutputConstraint(f"{param}.json", schema=schema)
        case StructuredOutputs(regex=str(pattern)):
            yield OutputConstraint(f"{param}.regex", regex=pattern)
        case StructuredOutputs(choice=list(choices)):
            yield OutputConstraint(f"{param}.choice", choice=choices)
        case StructuredOutputs(grammar=str(rules)):
            yield OutputConstraint(f"{param}.grammar", lark=rules)
        case StructuredOutputs(json_object=True):
            yield OutputConstraint(param, schema=ANY_OBJECT)
        case _:
            return
