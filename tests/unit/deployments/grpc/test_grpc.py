"""gRPC through a real socket: the same checks, keys, limits and answers as over HTTP."""

import asyncio
import hashlib
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import yaml
from google.protobuf.struct_pb2 import Struct
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.unit.deployments.http.conftest import (
    MAX_BODY_BYTES,
    FakeEngine,
    make_engine,
    make_serving,
    make_tokenizer,
)
from triptych.core import errors
from triptych.core.config import IngressConfig
from triptych.core.errors import ConfigError, Overloaded, QueueFull
from triptych.core.profile import Fidelity
from triptych.deployments.grpc import GrpcServer
from triptych.deployments.grpc.bodies import body_of, fill_message
from triptych.deployments.grpc.server import MAX_WATCHERS
from triptych.deployments.grpc.service import CODES, SERVICE
from triptych.deployments.grpc.triptych_pb2 import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessage,
    CompletionRequest,
    FunctionCall,
    ListModelsRequest,
    TokenIds,
    ToolCall,
)
from triptych.deployments.grpc.triptych_pb2_grpc import TriptychStub
from triptych.deployments.http import Health, ModelCard, OpenAIServing, create_app

TOKENIZER = make_tokenizer()
HELLO = [ChatMessage(role="user", content="hello")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def engine() -> FakeEngine:
    return make_engine(TOKENIZER)


@asynccontextmanager
async def serving(engine: FakeEngine, **settings: object) -> AsyncGenerator[grpc.aio.Channel, None]:
    limits = {"max_body_bytes": MAX_BODY_BYTES, "max_choices": 4, "request_timeout_s": 10.0}
    config = IngressConfig(grpc_port=free_port(), **{**limits, **settings})
    server = GrpcServer(make_serving(engine, TOKENIZER, config))
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield channel
    finally:
        await server.stop()


@pytest.fixture
async def stub(engine: FakeEngine) -> AsyncGenerator[TriptychStub, None]:
    async with serving(engine) as channel:
        yield TriptychStub(channel)


def struct(**values: object) -> Struct:
    made = Struct()
    made.update(values)
    return made


def trailers(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return dict(error.trailing_metadata())


async def refused(call: grpc.aio.UnaryUnaryCall) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert trailers(caught.value)["x-request-id"]
    return caught.value


# ------------------------------------------------------------------ answers


async def test_a_completion_has_text_usage_and_what_compression_did(stub: TriptychStub) -> None:
    call = stub.Completion(
        CompletionRequest(model="tiny", prompt=["a"], max_tokens=3, seed=0, temperature=0),
        metadata=(("x-request-id", "mine"),),
    )
    answer = await call
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("abc", "length")
    assert answer.usage.completion_tokens == 3
    assert (answer.usage.compression.policy, answer.usage.compression.ratio) == ("uniform:k8v4", 3)
    classes = answer.usage.compression.classes
    assert (classes.recent, classes.high, classes.low, classes.pruned) == (0.25, 0.5, 0.125, 0.125)
    assert answer.usage.HasField("prompt_tokens_details")
    assert answer.id.startswith("cmpl-")
    assert dict(await call.trailing_metadata())["x-request-id"] == "mine"


async def test_streams_say_the_same_as_whole_answers(stub: TriptychStub) -> None:
    asked = ChatCompletionRequest(messages=HELLO, max_tokens=4, seed=2, n=2)
    whole = await stub.ChatCompletion(asked)
    chunks = [chunk async for chunk in stub.StreamChatCompletion(asked)]
    assert len(chunks) > 8
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content for part in parts) == choice.message.content
        assert parts[-1].finish_reason == choice.finish_reason == "length"
    assert not chunks[-1].choices
    assert chunks[-1].usage == whole.usage


async def test_prompts_may_be_tokens_and_prompts_are_scored(stub: TriptychStub, engine) -> None:
    asked = CompletionRequest(
        prompt_token_ids=[TokenIds(ids=[5, 6]), TokenIds(ids=[7, 8, 9])],
        max_tokens=0,
        echo=True,
        logprobs=1,
        return_token_ids=True,
    )
    answer = await stub.Completion(asked)
    assert [request.prompt for request in engine.calls[0]] == [(5, 6), (7, 8, 9)]
    assert [list(choice.prompt_token_ids) for choice in answer.choices] == [[5, 6], [7, 8, 9]]
    logprobs = answer.choices[1].logprobs
    assert list(logprobs["token_logprobs"]) == [None, -1, -2]
    assert not answer.choices[1].token_ids


async def test_what_has_no_field_goes_into_extra(stub: TriptychStub, engine: FakeEngine) -> None:
    engine.script = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked = ChatCompletionRequest(
        messages=HELLO, max_tokens=200, extra=struct(tools=[tool], user="me")
    )
    (choice,) = (await stub.ChatCompletion(asked)).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"x": 1}')
    assert choice.finish_reason == "tool_calls"


async def test_an_answer_that_ends_inside_a_call_has_no_markup(
    stub: TriptychStub, engine: FakeEngine
) -> None:
    engine.script = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f"}}
    history = [
        *HELLO,
        ChatMessage(role="assistant", tool_calls=[ToolCall(function=FunctionCall(name="f"))]),
        ChatMessage(role="tool"),
    ]
    asked = ChatCompletionRequest(messages=history, max_tokens=30, extra=struct(tools=[tool]))
    (choice,) = (await stub.ChatCompletion(asked)).choices
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert not choice.message.tool_calls
    parts = [part async for part in stub.StreamChatCompletion(asked)]
    assert "".join(part.choices[0].delta.content for part in parts if part.choices) == ""
    assert [c.finish_reason for part in parts for c in part.choices][-1] == "length"


async def test_answers_say_what_compression_costs_at_about_their_length(
    engine: FakeEngine,
) -> None:
    measured = tuple(
        Fidelity(context=tokens, bytes_ratio=0.3, kl=kl, top1_agreement=0.98, perplexity_ratio=1.0)
        for tokens, kl in ((8, 0.25), (512, 0.5))
    )
    card = ModelCard(
        name="tiny",
        context_tokens=2048,
        created=0,
        methods=("uniform:k8v4",),
        fidelity={"uniform:k8v4": measured},
        measured_on="tiny, texts 0123",
    )
    config = IngressConfig(grpc_port=free_port())
    serving = OpenAIServing(engine=engine, tokenizer=TOKENIZER, model=card, config=config)
    server = GrpcServer(serving)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for prompt, at, kl in (("a", 8, 0.25), ("z" * 400, 512, 0.5)):
            asked = CompletionRequest(prompt=[prompt], max_tokens=1)
            told = (await TriptychStub(channel).Completion(asked)).usage.compression.estimated_error
            assert (told.measured_at_tokens, told.kl, told.top1_agreement) == (at, kl, 0.98)
    await server.stop()
    transport = httpx.ASGITransport(app=create_app(serving))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    expected = {
        "kl": 0.25,
        "top1_agreement": 0.98,
        "measured_at_tokens": 8,
        "measured_ratio": 3.333,
        "measured_on": "tiny, texts 0123",
    }
    assert answer.json()["usage"]["compression"]["estimated_error"] == expected
    assert answer.headers["x-triptych-estimated-kl"] == "0.25"


async def test_watchers_of_one_connection_are_few_and_share_a_probe(engine: FakeEngine) -> None:
    async with serving(engine) as channel, AsyncExitStack() as stack:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        calls = [watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_WATCHERS)]
        for call in calls:
            stack.callback(call.cancel)
            assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(health_pb2.HealthCheckRequest()).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls[0].cancel()
        async with asyncio.timeout(10):
            while True:  # the server sees the cancellation a little later
                again = watch(health_pb2.HealthCheckRequest())
                stack.callback(again.cancel)
                with suppress(grpc.aio.AioRpcError):
                    assert (await again.read()).status == health_pb2.HealthCheckResponse.SERVING
                    return
                await asyncio.sleep(0.02)


async def test_models_health_and_reflection(engine: FakeEngine) -> None:
    async with serving(engine) as channel:
        (model,) = (await TriptychStub(channel).ListModels(ListModelsRequest())).data
        assert (model.id, model.max_model_len) == ("tiny", 2048)
        check = health_pb2_grpc.HealthStub(channel).Check
        states = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            state = await check(health_pb2.HealthCheckRequest(service=name))
            assert state.status == states.SERVING
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == states.SERVING
        engine.health_state = Health(ok=False, reason="no decode worker is running")
        assert (await check(health_pb2.HealthCheckRequest())).status == states.NOT_SERVING
        assert (await watching.read()).status == states.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="no such service"):
            await check(health_pb2.HealthCheckRequest(service="other"))


async def test_reflection_can_be_turned_off(engine: FakeEngine) -> None:
    config = IngressConfig(grpc_port=free_port(), grpc_reflection=False)
    server = GrpcServer(make_serving(engine, TOKENIZER, config))
    await server.start()

    def look() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            ProtoReflectionDescriptorDatabase(channel).get_services()

    try:
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            await asyncio.to_thread(look)
    finally:
        await server.stop()


async def test_tools_find_the_schema_by_reflection(engine: FakeEngine) -> None:
    config = IngressConfig(grpc_port=free_port())
    server = GrpcServer(make_serving(engine, TOKENIZER, config))
    await server.start()

    def look() -> set[str]:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            return set(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {SERVICE, "grpc.health.v1.Health"} <= await asyncio.to_thread(look)
    await server.stop()


# ------------------------------------------------------------------ what is refused

WRONG = {
    "temperature": (CompletionRequest(prompt=["a"], temperature=99), "temperature"),
    "nan": (CompletionRequest(prompt=["a"], temperature=float("nan")), "temperature"),
    "no prompt": (CompletionRequest(), "prompt"),
    "two prompts": (
        CompletionRequest(prompt=["a"], prompt_token_ids=[TokenIds(ids=[1])]),
        "prompt_token_ids",
    ),
    "empty ids": (CompletionRequest(prompt_token_ids=[TokenIds()]), "prompt"),
    "id": (CompletionRequest(prompt_token_ids=[TokenIds(ids=[2**31])]), "prompt"),
    "bias": (CompletionRequest(prompt=["a"], logit_bias={10**6: 1}), "logit_bias.1000000"),
    "n": (CompletionRequest(prompt=["a"], n=5), "n"),
    "max_tokens": (CompletionRequest(prompt=["a"], max_tokens=-1), "max_tokens"),
    "stop": (CompletionRequest(prompt=["a"], stop=["a"] * 17), "stop"),
    "priority": (CompletionRequest(prompt=["a"], priority=101), "priority"),
    "too long": (CompletionRequest(prompt=["a"], max_tokens=4000), "max_tokens"),
    "extra twice": (CompletionRequest(prompt=["a"], extra=struct(n=2)), "extra.n"),
    "extra stream": (CompletionRequest(prompt=["a"], extra=struct(stream=True)), "extra.stream"),
    "extra number": (CompletionRequest(prompt=["a"], extra=struct(best_of=1.5)), "best_of"),
    "extra type": (CompletionRequest(prompt=["a"], extra=struct(suffix=[1])), "suffix"),
    "schema": (
        CompletionRequest(prompt=["a"], extra=struct(structured_outputs={"json": {"type": "x"}})),
        "structured_outputs.json",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_request_is_named(name: str, stub: TriptychStub, engine: FakeEngine) -> None:
    message, param = WRONG[name]
    error = await refused(stub.Completion(message))
    assert error.code() == StatusCode.INVALID_ARGUMENT, error
    told = trailers(error)
    assert told["x-error-type"] == "invalid_request_error"
    assert told["x-error-param"].startswith(param), told
    assert error.details()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [chunk async for chunk in stub.StreamCompletion(message)]
    assert (caught.value.code(), trailers(caught.value)["x-error-param"]) == (
        StatusCode.INVALID_ARGUMENT,
        told["x-error-param"],
    )
    assert engine.calls == []


async def test_codes_are_those_of_openai(stub: TriptychStub) -> None:
    error = await refused(stub.Completion(CompletionRequest(prompt=["word " * 4000])))
    assert error.code() == StatusCode.INVALID_ARGUMENT
    assert trailers(error)["x-error-code"] == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in error.details()
    error = await refused(stub.Completion(CompletionRequest(prompt=["a"], model="nothing")))
    assert error.code() == StatusCode.NOT_FOUND
    assert trailers(error)["x-error-code"] == "model_not_found"
    odd = CompletionRequest(prompt=["a"], extra=struct(logit_bias={}))
    assert (await refused(stub.Completion(odd))).code() == StatusCode.INVALID_ARGUMENT


def nested(depth: int) -> bytes:
    """A request whose ``extra`` is so deep that no encoder of ours would write it."""

    def field(tag: int, data: bytes) -> bytes:
        length = len(data)
        size = bytes([length]) if length < 128 else bytes([length & 127 | 128, length >> 7])
        return bytes([tag]) + size + data

    data = b""
    for _ in range(depth):  # a Struct has entries of a name and a Value, and that a Struct again
        data = field(0x0A, field(0x0A, b"a") + field(0x12, field(0x2A, data)))
    length = len(data)
    return b"\xe2\x03" + bytes([length & 127 | 128, length >> 7]) + data


async def test_bytes_that_are_no_message_are_the_clients_fault(engine: FakeEngine) -> None:
    async with serving(engine) as channel:
        send = channel.unary_unary(f"/{SERVICE}/Completion")
        for data in (
            b"\xff\xff\xff",
            b"\x12\xff\xff\xff\xff\x0f",
            b"\x12\x02\xff\xfe",  # a prompt that is not UTF-8
            nested(60),
        ):
            error = await refused(send(data))
            assert error.code() == StatusCode.INVALID_ARGUMENT, error
        assert CompletionRequest.FromString(nested(5)).HasField("extra")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE}/Nothing")(b"")
        assert caught.value.code() == StatusCode.UNIMPLEMENTED
    assert engine.calls == []


@pytest.mark.parametrize("compression", list(grpc.Compression))
async def test_what_is_too_large_is_not_read(engine: FakeEngine, compression) -> None:
    async with serving(engine) as channel:
        large = CompletionRequest(prompt=["a" * (MAX_BODY_BYTES + 1)])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await TriptychStub(channel).Completion(large, compression=compression)
        assert caught.value.code() == StatusCode.RESOURCE_EXHAUSTED
        metadata = (("authorization", "x" * (80 << 10)),)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await TriptychStub(channel).ListModels(ListModelsRequest(), metadata=metadata)
        assert caught.value.code() == StatusCode.RESOURCE_EXHAUSTED
        assert (await TriptychStub(channel).ListModels(ListModelsRequest())).data
    assert engine.calls == []


async def test_keys_and_their_limits_hold(engine: FakeEngine, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"ada-key").hexdigest()
    entry = {"name": "ada", "sha256": digest, "max_concurrent_requests": 1}
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump([entry]))
    engine.delay_s = 0.05
    asked = CompletionRequest(prompt=["a"], max_tokens=40)
    mine = (("authorization", "Bearer ada-key"),)
    async with serving(engine, api_keys=str(tmp_path / "keys.yaml")) as channel:
        stub = TriptychStub(channel)
        for call in (stub.Completion(asked), stub.ListModels(ListModelsRequest())):
            error = await refused(call)
            assert error.code() == StatusCode.UNAUTHENTICATED
            assert trailers(error)["x-error-code"] == "invalid_api_key"
        stream = stub.StreamCompletion(asked, metadata=mine)
        assert (await stream.read()).choices
        error = await refused(stub.Completion(asked, metadata=mine))
        assert error.code() == StatusCode.RESOURCE_EXHAUSTED
        assert trailers(error)["x-error-code"] == "rate_limit_exceeded"
        assert int(trailers(error)["grpc-retry-pushback-ms"]) >= 1
        stream.cancel()
        await until(lambda: engine.running == 0)
        assert (await stub.Completion(asked, metadata=mine)).choices


REFUSALS = {
    QueueFull(3, 2, 1.5): (StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded", "1500"),
    Overloaded("no decode worker"): (StatusCode.UNAVAILABLE, "overloaded", "1000"),
    ValueError("/secret/path"): (StatusCode.INTERNAL, "internal_error", None),
}


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
async def test_errors_of_the_engine_have_a_status(
    refusal: Exception, stub: TriptychStub, engine: FakeEngine
) -> None:
    code, name, pause = REFUSALS[refusal]
    engine.refusal = refusal
    error = await refused(stub.Completion(CompletionRequest(prompt=["a"])))
    told = trailers(error)
    assert (error.code(), told["x-error-code"]) == (code, name)
    assert told.get("grpc-retry-pushback-ms") == pause
    assert "secret" not in error.details()


async def test_a_failure_in_mid_stream_ends_it_with_a_status(
    stub: TriptychStub, engine: FakeEngine
) -> None:
    engine.crash, engine.fail_after = Overloaded("the router does not answer"), 2
    stream = stub.StreamCompletion(CompletionRequest(prompt=["a"], max_tokens=9, seed=0))
    chunks = [await stream.read(), await stream.read()]
    assert [choice.text for chunk in chunks for choice in chunk.choices] == ["a", "b"]
    with pytest.raises(grpc.aio.AioRpcError, match="router does not answer") as caught:
        await stream.read()
    assert caught.value.code() == StatusCode.UNAVAILABLE


def test_every_status_of_the_error_tree_has_a_code() -> None:
    tree = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    statuses = {kind.http_status for kind in tree if issubclass(kind, errors.TriptychError)}
    assert statuses - set(CODES) == {500}


# ------------------------------------------------------------------ ends


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["whole", "stream"])
async def test_who_cancels_frees_the_request(
    kind: str, stub: TriptychStub, engine: FakeEngine
) -> None:
    engine.delay_s = 0.02
    asked = CompletionRequest(prompt=["a"], max_tokens=2000)
    call = stub.Completion(asked) if kind == "whole" else stub.StreamCompletion(asked)
    if kind == "stream":
        await call.read()
    await until(lambda: engine.running == 1)
    call.cancel()
    await until(lambda: engine.running == 0)
    assert call.cancelled()


async def test_the_deadline_of_a_call_is_that_of_its_request(
    stub: TriptychStub, engine: FakeEngine
) -> None:
    for asked_ms, timeout, most in ((None, 30, 30.0), (5000.0, 30, 5.0), (50_000.0, 30, 30.0)):
        message = CompletionRequest(prompt=["a"], max_tokens=1, deadline_ms=asked_ms)
        await stub.Completion(message, timeout=timeout)
        (request,) = engine.calls[-1]
        # gRPC rounds what it sends up.
        assert 0.8 * most < request.slo.deadline_s < 1.05 * most
    await stub.Completion(CompletionRequest(prompt=["a"], max_tokens=1), timeout=10**6)
    assert engine.calls[-1][0].slo.deadline_s == 0
    engine.delay_s = 0.05
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Completion(CompletionRequest(prompt=["a"], max_tokens=2000), timeout=0.4)
    assert caught.value.code() == StatusCode.DEADLINE_EXCEEDED
    await until(lambda: engine.running == 0)


async def test_the_servers_own_limit_ends_both(engine: FakeEngine) -> None:
    engine.delay_s = 0.05
    asked = CompletionRequest(prompt=["a"], max_tokens=2000)
    async with serving(engine, request_timeout_s=0.3) as channel:
        stub = TriptychStub(channel)
        error = await refused(stub.Completion(asked))
        assert error.code() == StatusCode.DEADLINE_EXCEEDED
        assert "not finished within" in error.details()
        with pytest.raises(grpc.aio.AioRpcError, match="not finished within"):
            _ = [chunk async for chunk in stub.StreamCompletion(asked)]
    assert engine.running == 0


async def test_sessions_and_traces_come_as_metadata(stub: TriptychStub, engine: FakeEngine) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    metadata = (("x-session-id", "sea"), ("traceparent", parent))
    await stub.ChatCompletion(
        ChatCompletionRequest(messages=HELLO, max_tokens=1), metadata=metadata
    )
    (request,) = engine.calls[0]
    assert (request.session, request.traceparent) == ("sea", parent)


# ------------------------------------------------------------------ the server


async def test_it_is_off_by_default_and_copies_share_a_port(engine: FakeEngine) -> None:
    off = GrpcServer(make_serving(engine, TOKENIZER, IngressConfig()))
    await off.start()
    assert off.port == 0
    await off.stop()
    config = IngressConfig(grpc_port=free_port())
    async with AsyncExitStack() as stack:
        for _ in range(2):
            copy = GrpcServer(make_serving(engine, TOKENIZER, config))
            await copy.start()
            stack.push_async_callback(copy.stop)
            assert copy.port == config.grpc_port
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wrong = IngressConfig(grpc_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="set another port"):
            await GrpcServer(make_serving(engine, TOKENIZER, wrong)).start()


def test_bodies_keep_types_and_answers_lose_nothing() -> None:
    asked = ChatCompletionRequest(
        messages=HELLO,
        seed=-(2**63),
        temperature=0.0,
        logit_bias={7: 0.5},
        stop=["x"],
        extra=struct(a={"b": [1, 2.5, True, None, "x"]}, big=2.0**60),
    )
    assert body_of(asked) == {
        "messages": [{"role": "user", "content": "hello"}],
        "seed": -(2**63),
        "temperature": 0.0,
        "logit_bias": {"7": 0.5},
        "stop": ["x"],
        "a": {"b": [1, 2.5, True, None, "x"]},
        "big": 2.0**60,
    }
    told = {"id": "x", "object": "chat.completion", "choices": [{"index": 0, "news": [1]}]}
    message = fill_message(ChatCompletionResponse(), told)
    assert (message.id, list(message.choices[0].extra["news"])) == ("x", [1])
