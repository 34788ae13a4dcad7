"""Traces of requests: what a collector gets, and that it cannot hold anything up."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from triptych.core.messages import CompressionReport, Request, Sampling
from triptych.deployments.monitoring.tracing import Tracer, payload, spans_of, valid_parent
from triptych.router import RequestAttempts, RequestTrace
from triptych.router.state.history import History

HEX = "0123456789abcdef" * 2
PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
LIFE = RequestTrace(
    request=f"chatcmpl-{HEX}-0",
    number=1,
    attempt=0,
    prompt_tokens=100,
    max_tokens=9,
    steps=(("waiting", 1.0), ("prefilling", 1.5), ("compressing", 2.0), ("decoding", 2.5)),
    end="finished",
    ended=4.0,
    tokens=7,
    report=CompressionReport(policy="uniform:k8v4", raw_bytes=3000, stored_bytes=1000),
)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies = list[bytes]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_request_is_one_trace_with_a_span_for_each_state() -> None:
    own, *states = spans_of(LIFE, 1000.0)
    assert own["traceId"] == HEX  # the id of the answer leads to its trace
    assert [span["name"] for span in states] == ["waiting", "prefilling", "compressing", "decoding"]
    assert {span["traceId"] for span in states} == {HEX}
    assert {span["parentSpanId"] for span in states} == {own["spanId"]}
    assert len({span["spanId"] for span in (own, *states)}) == 5
    times = [(span["startTimeUnixNano"], span["endTimeUnixNano"]) for span in (own, *states)]
    assert times[0] == (str(1001 * 10**9), str(1004 * 10**9))
    assert [end for _, end in times[1:-1]] == [start for start, _ in times[2:]]
    told = {one["key"]: one["value"] for one in states[2]["attributes"]}
    assert told["triptych.bytes"] == {"intValue": "3000"}


def test_a_client_may_bring_its_own_trace() -> None:
    own, *states = spans_of(replace(LIFE, traceparent=PARENT), 0.0)
    assert (own["traceId"], own["parentSpanId"]) == ("ab" * 16, "cd" * 8)
    assert {span["parentSpanId"] for span in states} == {own["spanId"]}


def test_the_protocol_s_own_types_can_read_it() -> None:
    traces = [LIFE, replace(LIFE, end="failed", code="worker_lost", report=None, number=2)]
    spans = [span for trace in traces for span in spans_of(trace, 1e9)]
    request = Parse(json.dumps(payload(spans)), ExportTraceServiceRequest())
    ((scope,),) = [one.scope_spans for one in request.resource_spans]
    assert len(scope.spans) == len(spans)
    assert scope.spans[5].status.code == 2


def test_the_router_remembers_whose_trace_a_request_belongs_to() -> None:
    asked = Request(id="r", prompt=(1,), sampling=Sampling(), reply_to="here", traceparent=PARENT)
    history = History()
    history.begin(RequestAttempts(asked, ignore).present(), "waiting", 1.0)
    (trace,) = history
    assert trace.traceparent == PARENT


def ignore(_: object) -> None:
    return


@pytest.mark.parametrize(
    ("header", "is_valid"),
    [
        (PARENT, True),
        ("", False),
        (PARENT.upper(), False),
        (PARENT + "-more", False),
        (f"00-{'0' * 32}-{'cd' * 8}-01", False),
        (f"00-{'ab' * 16}-{'0' * 16}-01", False),
        (f"ff-{'ab' * 16}-{'cd' * 8}-01", False),
        ("a" * 10_000, False),
        (PARENT + "\n", False),
    ],
)
def test_what_is_no_trace_context_is_left_out(header: str, is_valid: bool) -> None:
    assert valid_parent(header) == (header if is_valid else "")


def test_a_request_is_told_once_when_it_has_ended_and_if_it_is_wanted() -> None:
    tracer = Tracer("http://127.0.0.1:1")
    running = replace(LIFE, number=2, end="", ended=0.0)
    unwanted = replace(LIFE, number=3, traceparent=PARENT[:-2] + "00")
    assert tracer.fresh([LIFE, running, unwanted]) == [LIFE]
    assert tracer.fresh([LIFE, running, unwanted]) == []
    ended = replace(running, end="cancelled", ended=5.0)
    assert tracer.fresh([ended, unwanted]) == [ended]


async def test_traces_are_posted_and_what_is_not_taken_is_lost(collector, caplog) -> None:
    url, bodies = collector
    tracer = Tracer(url)
    await tracer.post([LIFE], 0.0)
    await tracer.post([LIFE], 0.0)
    assert len(bodies) == 1
    assert len(json.loads(bodies[0])["resourceSpans"][0]["scopeSpans"][0]["spans"]) == 5
    deaf = Tracer("http://127.0.0.1:1/v1/traces")
    for number in (2, 3):
        await deaf.post([replace(LIFE, number=number)], 0.0)
    (warning,) = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert "router.otlp_traces_endpoint=http://127.0.0.1:1" in warning
