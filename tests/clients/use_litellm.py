"""litellm: whole, streamed, tools, structured, and its own errors."""

import json
import sys

import litellm

url, model = sys.argv[1:]
common = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 48}
question = [{"role": "user", "content": "What is the capital of Japan?"}]
tool = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

whole = litellm.completion(messages=question, temperature=0, **common)
assert "Tokyo" in whole.choices[0].message.content, whole
assert whole.usage.completion_tokens > 0

pieces = litellm.completion(messages=question, temperature=0, stream=True, **common)
text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
assert text == whole.choices[0].message.content, (text, whole)

called = litellm.completion(messages=question, tools=[tool], tool_choice="required", **common)
(call, *_) = called.choices[0].message.tool_calls
assert called.choices[0].finish_reason in {"tool_calls", "length"}, called
assert set(json.loads(call.function.arguments)) == {"city"}

try:
    litellm.completion(messages=[{"role": "user", "content": "word " * 20_000}], **common)
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("a prompt that is too long was taken")

try:
    litellm.completion(messages=question, **{**common, "model": "openai/nothing"})
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("a model that is not there was taken")

plain = litellm.text_completion(prompt="The capital of Japan is", temperature=0, **common)
assert plain.choices[0].text
