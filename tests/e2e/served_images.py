"""Images through the whole server, against transformers: ``make images``.

A tiny random LLaVA is served by ``serve run``, disaggregated and colocated, and models of other
families colocated. Chats with images and text in any order must have the tokens of transformers,
streamed or not; then encode workers are killed, bad images are refused, and no page may be left.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import openai
import pytest
from PIL import Image

from tests.e2e.conftest import START_TIMEOUT_S, Server, serve_run
from tests.tiny_vision import (
    Reference,
    data_uri,
    random_images,
    save_tiny_gemma3,
    save_tiny_idefics3_with_tiles,
    save_tiny_mistral3,
    save_tiny_qwen2_vl,
    save_tiny_smolvlm,
    save_tiny_vision_model,
)
from triptych.cli.output import console

TOKENS = 24
OTHERS = {
    "Idefics3": save_tiny_idefics3_with_tiles,
    "SmolVLM": save_tiny_smolvlm,
    "Qwen2.5-VL": save_tiny_qwen2_vl,
    "Mistral 3": save_tiny_mistral3,
    "Gemma 3": save_tiny_gemma3,
}
TOPOLOGIES = (("disaggregated", "own"), ("disaggregated", "prefill"), ("colocated", "own"))
"""Topologies, and which workers encode images."""
STAGES = {"Encode": "encode", "Prefill": "prefill", "Compressor": "compress", "Decode": "decode"}
"""Stages by the name of their deployment."""
COPIES = 2
"""Workers of each stage, where one of them is killed."""
IMAGES = random_images(10, seed=3)
CHATS: list[list[int | str]] = [
    [0, "what is this?"],
    ["first", 1, "then", 2, 3, "and then", 1, "?"],
    ["no image"],
    [*range(10), "ten of them"],
    ["a", 4, "b", 5, "c", 6, "d", 7, "e", 8, "f", 9, "g", 0, "h", 1, "i", 2, "j", 3],
]


def parts_of(chat: list[int | str]) -> list[dict[str, object]]:
    return [
        {"type": "text", "text": one}
        if isinstance(one, str)
        else {"type": "image_url", "image_url": {"url": data_uri(IMAGES[one])}}
        for one in chat
    ]


def expected(reference: Reference, chat: list[int | str]) -> tuple[int, list[int]]:
    """Prompt tokens and output tokens of transformers."""
    content = [
        {"type": "text", "text": one} if isinstance(one, str) else {"type": "image"} for one in chat
    ]
    images = [IMAGES[one] for one in chat if isinstance(one, int)]
    text = reference.chat([{"role": "user", "content": content}], images)
    return len(reference.prompt(text, images)), reference.tokens(text, images, TOKENS)


def ask(client: openai.OpenAI, chat: list[int | str], *, stream: bool) -> tuple[int, list[int]]:
    given = {
        "model": "tiny",
        "messages": [{"role": "user", "content": parts_of(chat)}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    if not stream:
        answer = client.chat.completions.create(**given)
        return answer.usage.prompt_tokens, answer.choices[0].token_ids
    tokens, count = list[int](), 0
    for event in client.chat.completions.create(
        **given, stream=True, stream_options={"include_usage": True}
    ):
        count = event.usage.prompt_tokens if event.usage else count
        for choice in event.choices:
            tokens += choice.token_ids or []
    return count, tokens


def is_right(got: tuple[int, list[int]], wanted: tuple[int, list[int]]) -> bool:
    """Whether an answer has the prompt tokens and, as far as they are sure, the output tokens."""
    return got[0] == wanted[0] and got[1][: len(wanted[1])] == wanted[1]


def check(server: Server, reference: Reference, topology: str) -> None:
    client = server.client(timeout=120)
    for chat in CHATS:
        wanted = expected(reference, chat)
        for stream in (False, True):
            got = ask(client, chat, stream=stream)
            assert is_right(got, wanted), (topology, chat, stream, got, wanted)
    console.print(f"{topology}: {2 * len(CHATS)} chats have the tokens of transformers")
    _refuse(client)
    reasons = server.metrics("triptych_router_decisions")
    console.print(
        {name: count for name, count in reasons.items() if "image" in name or "encode" in name}
    )


def _refuse(client: openai.OpenAI) -> None:
    bomb = data_uri(Image.new("L", (4000, 4000)))
    for url in ("https://example.org/a.png", "data:image/png;base64,AAAA", bomb):
        part = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises(openai.BadRequestError) as refusal:
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": [part]}], max_tokens=1
            )
        assert refusal.value.param == "messages.0.content.0"
        console.print(f"refused: {refusal.value.message[:160]}")


def kill_workers(server: Server, reference: Reference, rounds: int) -> None:
    """Chats go on while a worker of each stage dies; each has the tokens of transformers."""
    client, over, wrong = server.client(timeout=180), threading.Event(), list[object]()
    wanted = [expected(reference, chat) for chat in CHATS]
    done = [0] * 3

    def chat_on(thread: int) -> None:
        while not over.is_set():
            for chat, right in zip(CHATS, wanted, strict=True):
                if over.is_set():
                    return
                got = ask(client, chat, stream=True)
                if not is_right(got, right):
                    wrong.append((chat, got, right))
                done[thread] += 1

    threads = [threading.Thread(target=chat_on, args=(thread,)) for thread in range(len(done))]
    for thread in threads:
        thread.start()
    for deployment, stage in list(STAGES.items()) * rounds:
        server.wait_until(lambda stage=stage: _workers(server, stage) == COPIES, START_TIMEOUT_S)
        time.sleep(4)
        (victim, *_other) = server.replicas(deployment)
        os.kill(victim.pid, signal.SIGKILL)
        server.wait_until(lambda stage=stage: _workers(server, stage) == COPIES - 1, 60)
        before = sum(done)
        server.wait_until(lambda before=before: sum(done) >= before + 2 * len(CHATS), 180)
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:1]
    console.print(
        f"{rounds} workers killed of each of {', '.join(STAGES.values())}: {sum(done)} chats, all "
        "as transformers"
    )


def _workers(server: Server, stage: str) -> float:
    """Workers of a stage that the router knows."""
    return server.metrics("triptych_workers")[f'stage="{stage}"']


def settings(
    model: Path, topology: str, copies: int = 1, encode_worker: str = "own"
) -> dict[str, object]:
    """``copies``: workers of each stage."""
    actor = {"actor": {"num_replicas": copies}}
    return {
        "model": {"name": str(model), "served_model_name": "tiny", "dtype": "float32"},
        "topology": topology,
        "pool": {"kv_cache_memory_bytes": 256 << 20, "prefix_bytes": 0},
        "encode": {"cache_bytes": 1 << 20, "worker": encode_worker, **actor},
        "prefill": actor,
        "compressor": {"policy": "uniform:fp16", **actor},
        "decode": actor,
    }


def serve_family(directory: Path, name: str, model: Path) -> None:
    with serve_run(directory, settings(model, "colocated")) as server:
        check(server, Reference(model), name)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    with tempfile.TemporaryDirectory() as directory:
        for name, save in OTHERS.items():
            serve_family(Path(directory), name, save(Path(directory) / name))
        model = save_tiny_vision_model(Path(directory) / "model")
        reference = Reference(model)
        for topology, worker in TOPOLOGIES:
            is_killed = (topology, worker) == TOPOLOGIES[0]
            args = settings(model, topology, COPIES if is_killed else 1, worker)
            with serve_run(Path(directory), args) as server:
                check(server, reference, f"{topology}, encode worker {worker}")
                if is_killed:
                    kill_workers(server, reference, rounds)
                server.wait_until(
                    lambda server=server: server.metric("triptych_pool_pages_in_requests") == 0, 60
                )
                assert server.metric("triptych_router_booked_bytes") == 0
                console.print(f"{topology}: no page and no booked byte is left")


if __name__ == "__main__":
    main()
