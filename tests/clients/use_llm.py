"""llm: its command line, with the server as an extra OpenAI model."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

url, model = sys.argv[1:]
MODELS = f"""
- model_id: ours
  model_name: {model}
  api_base: "{url}/v1"
  api_key_name: ours
"""


def llm(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return done.stdout


with TemporaryDirectory() as directory:
    os.environ["LLM_USER_PATH"] = directory
    Path(directory, "extra-openai-models.yaml").write_text(MODELS)
    asked = ["-m", "ours", "--key", "none", "-o", "max_tokens", "32", "-o", "temperature", "0"]
    streamed = llm("What is the capital of Japan?", *asked)
    assert "Tokyo" in streamed, streamed
    assert llm("What is the capital of Japan?", *asked, "--no-stream") == streamed
    assert llm("-c", "And of France?", *asked)
    assert "ours" in llm("models")
