"""langchain-openai: invoke, stream, batch, structured output, bound tools."""

import asyncio
import sys
from typing import Annotated, Literal

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:]
common = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "temperature": 0}
chat = ChatOpenAI(max_tokens=48, **common)


class Town(BaseModel):
    """A town."""

    name: Annotated[str, Field(max_length=12)]
    size: Literal["small", "large"]


whole = chat.invoke("What is the capital of Japan?")
assert "Tokyo" in whole.content, whole
assert whole.usage_metadata["output_tokens"] > 0

chunks = list(chat.stream("What is the capital of Japan?", stream_usage=True))
assert "".join(chunk.content for chunk in chunks) == whole.content
assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1

assert len(chat.batch(["Say one.", "Say two."])) == 2
assert asyncio.run(chat.ainvoke("What is the capital of Japan?")).content == whole.content

for method in ("json_schema", "function_calling"):
    structured = chat.with_structured_output(Town, method=method, strict=True)
    assert isinstance(structured.invoke("Name a town in Japan."), Town)

tools = chat.bind_tools([Town], tool_choice="required", parallel_tool_calls=False, strict=True)
assert tools.invoke("Name a town in Japan.").tool_calls[0]["name"] == "Town"

assert OpenAI(max_tokens=16, **common).invoke("The capital of Japan is")
