"""``triptych serve`` as a user, systemd and docker treat it, with a model of the user's own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.conftest import Server, free_port, start_command, wait_for_health
from tests.tiny import byte_tokenizer

SHARED = Path("/dev/shm")
NAME = "org/Tiny-0.6B"
CONTEXT_TOKENS = 40_960
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{{ "\\n" }}{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ "\\n" }}{% endfor %}
{%- if add_generation_prompt %}assistant: <think>
{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Ulm", "Bonn"]}},
            "required": ["city"],
        },
    },
}


def pools() -> set[str]:
    return {path.name for path in SHARED.glob("triptych-*")}


def save(path: Path) -> None:
    """A random model that has the tags of reasoning and calls as tokens, as Qwen3 has."""
    tokenizer = byte_tokenizer()
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "top_k": 200}))


@dataclass(frozen=True)
class Served:
    """The command, its server, and the pools of other servers."""

    server: Server
    process: "subprocess.Popen[bytes]"
    others: set[str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory, others = tmp_path_factory.mktemp("own"), pools()
    save(directory / NAME)
    options = ["--api-key", "secret", "--kv-cache-memory-bytes", "256MiB"]
    server, process = start_command(NAME, options, directory)
    try:
        wait_for_health(server, process, server.log)
        yield Served(server, process, others)
    finally:
        process.kill()
        process.wait()


def test_a_client_uses_its_name_tools_and_reasoning_without_max_tokens(served: Served) -> None:
    server = served.server
    with pytest.raises(openai.AuthenticationError):
        server.client().models.list()
    client = server.client(api_key="secret")
    cards = client.models.list().data
    assert [card.id for card in cards] == [NAME, "Tiny-0.6B"]
    assert cards[0].model_dump()["max_model_len"] == CONTEXT_TOKENS
    question = {"role": "user", "content": "How is the weather?"}
    asked = client.chat.completions.create(
        model=NAME,
        messages=[question],
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
    )
    choice = asked.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.model_dump()["reasoning_content"]
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert json.loads(call.function.arguments)["city"] in ("Ulm", "Bonn")
    assert asked.model == NAME
    assert asked.system_fingerprint
    answer = client.chat.completions.create(
        model="Tiny-0.6B",
        messages=[
            question,
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "It rains."},
        ],
        tools=[WEATHER],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "rain", "schema": {"type": "boolean"}},
        },
        seed=2,
    ).choices[0]
    assert answer.finish_reason in ("stop", "tool_calls")
    if answer.finish_reason == "stop":
        assert json.loads(answer.message.content) in (True, False)
    assert answer.message.model_dump()["reasoning_content"]


def test_a_second_server_does_not_replace_the_first(served: Served) -> None:
    """It finds the Ray of the first one, as each command does that is not given an address."""
    command = [Path(sys.executable).with_name("triptych"), "serve", NAME, "--port"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    second = subprocess.run(
        [*command, str(free_port())],
        cwd=served.server.log.parent,
        env=environment | {"RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert second.returncode != 0
    assert "already: stop that server first" in second.stderr + second.stdout
    assert served.server.client(api_key="secret").models.list().data[0].id == NAME


def test_a_server_that_is_terminated_leaves_nothing_in_shared_memory(served: Served) -> None:
    log = served.server.log
    own = pools() - served.others
    assert own
    served.process.terminate()
    assert served.process.wait(timeout=60) == 0, log.read_text()[-4000:]
    assert not pools() & own
    assert "retries remaining" not in log.read_text()  # of calls that Serve's controller ends under
