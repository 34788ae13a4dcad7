"""``triptych chat``: talk to a running server from a terminal."""

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import typer

from triptych.cli.output import notes

CONNECT_TIMEOUT_S = 5.0

Message = Annotated[
    str | None, typer.Argument(help="One message; if not given, messages are read until Ctrl-D.")
]
Url = Annotated[str, typer.Option(help="Server URL.")]
Model = Annotated[str | None, typer.Option(help="Model name; the server's if not given.")]
ApiKey = Annotated[str, typer.Option(help="API key, if the server wants one.")]
System = Annotated[str, typer.Option(help="System message.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Maximum output tokens.")]


def chat(
    message: Message = None,
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    api_key: ApiKey = "",
    system: System = "",
    max_tokens: MaxTokens = None,
) -> None:
    """Chat with a running server. Answers go to standard output, reasoning to standard error."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    messages = [{"role": "system", "content": system}] if system else []
    base = f"{url.rstrip('/')}/v1"
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=timeout) as client:
            name = model or _model_of(client)
            body: dict[str, Any] = {"model": name, "messages": messages, "stream": True}
            if max_tokens is not None:
                body["max_tokens"] = max_tokens
            for text in _questions(message):
                messages.append({"role": "user", "content": text})
                answer = _print_answer(_deltas(client, body))
                messages.append({"role": "assistant", "content": answer})
    except httpx.HTTPError as error:
        notes.print(f"triptych: {url}: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


def _questions(message: str | None) -> Iterator[str]:
    """One message, or those that the user writes."""
    if message is not None:
        yield message
        return
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text:
            yield text


def _model_of(client: httpx.Client) -> str:
    answer = client.get("/models")
    _check(answer)
    return str(answer.json()["data"][0]["id"])


def _check(answer: httpx.Response) -> None:
    """Raises: httpx.HTTPError with the server's message"""
    if answer.is_success:
        return
    try:
        reason = json.loads(answer.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        reason = answer.reason_phrase
    raise httpx.HTTPError(f"{answer.status_code}: {reason}")


def _deltas(client: httpx.Client, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The deltas of one streamed answer.

    Raises: httpx.HTTPError if the server answers or ends with an error
    """
    with client.stream("POST", "/chat/completions", json=body) as answer:
        _check(answer)
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":  # a comment, an empty line, or the end
                continue
            event = json.loads(data)
            if "error" in event:
                raise httpx.HTTPError(str(event["error"]["message"]))
            yield from (choice["delta"] for choice in event["choices"])


def _print_answer(deltas: Iterator[dict[str, Any]]) -> str:
    """Print an answer as it comes, and return its content."""
    content = list[str]()
    for delta in deltas:
        if reasoning := delta.get("reasoning_content"):
            notes.print(reasoning, style="dim", end="", markup=False)
        if text := delta.get("content"):
            if not content:
                notes.file.flush()
            content.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    return "".join(content)
