"""Frames: what was packed comes back; anything else is refused."""

import struct
from dataclasses import replace
from typing import cast

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core import schema
from triptych.core.errors import MessageError
from triptych.core.handles import KVHandle, LeaseId, LeaseRef, PageRun
from triptych.core.messages import (
    MAX_SUBMIT_TOKENS,
    WIRE_VERSION,
    ChildRequest,
    CompressionReport,
    Join,
    PromptLogprobs,
    Request,
    Sampling,
    Submit,
    TokenLogprob,
    Tokens,
    pack,
    submits,
    unpack,
)

REQUEST = Request(
    id="r1",
    prompt=(1, 2, 3),
    sampling=Sampling(logit_bias=((5, 1.0),), stop=("\n",), seed=-3),
    reply_to="unix:/run/x.sock",
)
HANDLE = KVHandle(LeaseRef("arena", LeaseId(9), 2), (PageRun("fp16", b"\x03\0\0\0", b"ids"),), 3)
REPORT = CompressionReport(policy="uniform:k8v4", raw_bytes=10, stored_bytes=4)
MESSAGES = [
    Submit(request=REQUEST),
    Submit(
        request=REQUEST,
        children=(
            ChildRequest(id="r2", seed=4, max_tokens=3),
            ChildRequest(id="r3", seed=5, max_tokens=3, prompt_logprobs=1, prompt=(7,)),
        ),
    ),
    Join(request=REQUEST, output_tokens=(4,), handle=HANDLE, report=REPORT),
    Tokens(
        request="r1",
        index=0,
        tokens=(4, 5),
        text="né",
        logprobs=(TokenLogprob(token=4, logprob=-0.5, top=((4, -0.5), (7, -1.0))),),
        finish="stop",
        stop=5,
        prompt_logprobs=PromptLogprobs(
            top=1,
            ids=struct.pack("<2i", 7, 8),
            logprobs=struct.pack("<4f", -1.5, -0.5, -0.25, -0.25),
            ranks=struct.pack("<2i", 3, 1),
        ),
    ),
]


def test_log_probabilities_of_a_prompt_are_read_row_by_row() -> None:
    first, second = MESSAGES[-1].prompt_logprobs.rows()
    assert (first.logprob, first.rank, first.top) == (-1.5, 3, ((7, -0.5),))
    assert (second.logprob, second.rank, second.top) == (-0.25, 1, ((8, -0.25),))
    alone = PromptLogprobs(top=0, ids=b"", logprobs=struct.pack("<f", -2.0), ranks=b"\4\0\0\0")
    assert [(row.logprob, row.rank, row.top) for row in alone.rows()] == [(-2.0, 4, ())]


def test_who_is_told_log_probabilities_can_be_told_nothing_twice() -> None:
    assert not Sampling().reports_logprobs
    assert Sampling(logprobs=0).reports_logprobs
    assert Sampling(prompt_logprobs=0).reports_logprobs


@pytest.mark.parametrize(
    ("top", "ids", "logprobs", "ranks"),
    [(1, 4, 4, 4), (1, 8, 8, 4), (0, 0, 4, 3), (-1, 0, 0, 4), (2**40, 4, 8, 4), (0, 4, 4, 4)],
)
def test_arrays_that_do_not_fit_together_are_refused(top, ids, logprobs, ranks) -> None:
    odd = PromptLogprobs(top=top, ids=bytes(ids), logprobs=bytes(logprobs), ranks=bytes(ranks))
    with pytest.raises(MessageError, match="log probabilities of a prompt"):
        list(odd.rows())


def choices(prompts: list[tuple[int, ...]], each: int) -> list[Request]:
    """The sequences of one client's request, with a grammar and ``logit_bias``."""
    shared = Sampling(grammar="x" * 10_000, logit_bias=tuple((i, 1.0) for i in range(480)))
    return [
        replace(
            REQUEST,
            id=f"r-{index}",
            prompt=prompts[index // each],
            sampling=replace(shared, seed=index, max_tokens=5 + index // each),
        )
        for index in range(len(prompts) * each)
    ]


def test_what_choices_share_is_sent_once() -> None:
    requests = choices([(1,) * 900, (2,) * 800], 32)
    [message] = submits(requests)
    assert [*message.requests] == requests
    frame = pack([message])
    assert len(frame) < 2 * len(pack([Submit(request=requests[0])]))
    [received] = unpack(frame)
    assert [*received.requests] == requests


def test_requests_that_differ_in_more_are_messages_of_their_own() -> None:
    one, two, three = choices([(1,)], 3)
    two = replace(two, sampling=replace(two.sampling, temperature=0.5))
    found = submits([one, two, three])
    assert [request for message in found for request in message.requests] == [one, two, three]
    assert len(found) == 3
    assert submits([]) == []


def test_long_prompts_are_spread_over_messages() -> None:
    requests = choices([(index,) * (MAX_SUBMIT_TOKENS // 3) for index in range(7)], 2)
    found = submits(requests)
    assert [request for message in found for request in message.requests] == requests
    assert len(found) == 3


def test_a_list_of_plain_values_is_checked_like_any_other() -> None:
    for prompt in ((1, True), (1, 2.0), (True,), ("1",)):
        with pytest.raises(MessageError, match="expected int"):
            unpack(pack([Submit(request=replace(REQUEST, prompt=prompt))]))
    for bias in (((1, 2.0, 3),), ((1.5, 2.0),), ((1, True),)):
        odd = replace(REQUEST, sampling=Sampling(logit_bias=bias))
        with pytest.raises(MessageError):
            unpack(pack([Submit(request=odd)]))
    whole = replace(REQUEST, sampling=Sampling(logit_bias=((1, 2),)))
    [received] = unpack(pack([Submit(request=whole)]))
    assert type(received.request.sampling.logit_bias[0][1]) is float


def test_messages_come_back_equal_and_in_order() -> None:
    assert unpack(pack(MESSAGES)) == MESSAGES


def test_defaults_are_left_out_and_come_back() -> None:
    token = Tokens(request="r", index=3, tokens=(5,), text=" a")
    [(_, sent)] = msgpack.unpackb(pack([token]))[1:]
    assert set(sent) == {"request", "index", "tokens", "text"}
    assert unpack(pack([token])) == [token]
    last = replace(token, finish="stop", stop=0, cached_tokens=1)
    [received] = unpack(pack([last]))
    assert received == last
    assert type(received.stop) is int


def test_values_that_fit_are_not_compared_with_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> list[str]:
        raise AssertionError("a similar name is looked for, and nothing is wrong")

    monkeypatch.setattr(schema, "get_close_matches", fail)
    token = {"request": "r", "index": 3, "tokens": [5], "text": " a", "finish": None, "stop": None}
    frame = cast("bytes", msgpack.packb([WIRE_VERSION, ["Tokens", token]]))
    assert unpack(frame) == [Tokens(request="r", index=3, tokens=(5,), text=" a")]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgpack.packb([WIRE_VERSION + 1, ["Submit", {}]]),
        msgpack.packb([WIRE_VERSION, ["Explode", {}]]),
        msgpack.packb([WIRE_VERSION, ["Submit", {}]]),
        msgpack.packb([WIRE_VERSION, ["Submit", {"request": 3}]]),
        msgpack.packb([WIRE_VERSION, ["Cancel", {"requests": ["a"], "also": 1}]]),
        msgpack.packb([WIRE_VERSION, ["Cancel", {"requests": [1]}]]),
        msgpack.packb([WIRE_VERSION, "Cancel"]),
        msgpack.packb({"1": 2}),
        b"\x80\x04\x95\x0b\x00\x00\x00",  # the head of a pickle
    ],
)
def test_what_is_not_a_message_is_refused(frame: bytes) -> None:
    with pytest.raises(MessageError):
        unpack(frame)


def test_a_frame_of_the_release_before_is_refused_with_a_sentence() -> None:
    frame = cast("bytes", msgpack.packb([WIRE_VERSION - 1, ["Hello", {}]]))
    expected = (
        f"wire version {WIRE_VERSION - 1}: this process reads version {WIRE_VERSION}; run one"
    )
    with pytest.raises(MessageError, match=expected):
        unpack(frame)


@given(st.data())
def test_a_mutated_frame_is_refused_or_still_typed(data: st.DataObject) -> None:
    frame = bytearray(pack(MESSAGES))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        revived = unpack(bytes(frame))
    except MessageError:
        return
    assert all(type(item) in (Submit, Join, Tokens) for item in revived)
