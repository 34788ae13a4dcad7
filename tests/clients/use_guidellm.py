"""guidellm: a run on each of the two APIs, with the tokens that were asked for and no error."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

url, model = sys.argv[1:]
folder = os.environ["MODEL_FOLDER"]  # its tokenizer makes up the prompts
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 48, 12


def run(route: str, path: Path) -> dict[str, object]:
    """The one benchmark of a run with two clients."""
    options = {
        "--backend": {
            "kind": "openai_http",
            "target": url,
            "model": model,
            "request_format": route,
        },
        "--profile": {"kind": "concurrent", "streams": 2},
        "--constraint": {"kind": "max_requests", "count": REQUESTS},
        "--tokenizer": {"kind": "huggingface_auto", "model": folder},
        "--data": {
            "kind": "synthetic_text",
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
        },
        "--output": {"kind": "json", "path": str(path)},
    }
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    for name, value in options.items():
        command += [name, json.dumps(value)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    subprocess.run(command, check=True, timeout=500, env=env, cwd=path.parent)
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    return benchmark


with TemporaryDirectory() as directory:
    for route in ("/v1/completions", "/v1/chat/completions"):
        requests = run(route, Path(directory, "out.json"))["requests"]
        assert not requests["errored"], requests["errored"]
        assert len(requests["successful"]) == REQUESTS, requests
        for one in requests["successful"]:
            assert one["output_tokens"] == OUTPUT_TOKENS, one
            assert one["prompt_tokens"] >= PROMPT_TOKENS - 2, one
            assert one["time_to_first_token_ms"] > 0, one
