"""instructor: models from JSON mode, JSON schemas and tools; it asks again if one does not fit."""

import sys
from typing import Annotated, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

url, model = sys.argv[1:]
openai = OpenAI(base_url=f"{url}/v1", api_key="none")
question = [{"role": "user", "content": "Tokyo is a large town in Japan. What is the town?"}]


class Town(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or a small model goes on with fields of its own
    name: Annotated[str, Field(max_length=12)]
    size: Literal["small", "large"]


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(openai, mode=mode)
    town = client.chat.completions.create(
        model=model,
        messages=question,
        response_model=Town,
        max_tokens=96,
        temperature=0,
        max_retries=2,
    )
    assert isinstance(town, Town), (mode, town)
