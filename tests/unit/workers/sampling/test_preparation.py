"""A request waits for its grammar, in order, and no other request waits with it."""

import threading
import time
from dataclasses import dataclass, field

from triptych.core.messages import Cancel, Message, Prefill, Request, Sampling
from triptych.workers.sampling.preparation import GrammarPreparation
from triptych.workers.stage import requests_of


@dataclass
class FakeFactory:
    """Compiles when it is allowed to."""

    may_compile: threading.Event = field(default_factory=threading.Event)
    compiled: set[str] = field(default_factory=set[str])
    threads: set[str] = field(default_factory=set[str])

    def is_ready(self, grammar: str) -> bool:
        return grammar in self.compiled

    def compile(self, grammar: str) -> None:
        assert self.may_compile.wait(10)
        self.threads.add(threading.current_thread().name)
        if grammar == "bad":
            raise RuntimeError("cannot be compiled")
        self.compiled.add(grammar)


def prompt(name: str, grammar: str = "") -> Request:
    return Request(id=name, prompt=(1,), sampling=Sampling(grammar=grammar), reply_to="")


def prompts(*requests: Request) -> Prefill:
    return Prefill(requests=requests, encoders=tuple(f"to {one.id}" for one in requests))


class Preparing:
    def __init__(self) -> None:
        self.factory, self.came = FakeFactory(), list[Message]()
        self.preparation = GrammarPreparation(self.came.append, self.factory)  # type: ignore[arg-type]

    def post(self, message: Message) -> None:
        self.preparation.post(message)

    def names(self) -> list[str]:
        return [name for message in self.came for name in requests_of(message)]

    def wait_for(self, count: int) -> None:
        until = time.monotonic() + 10
        while len(self.names()) < count and time.monotonic() < until:
            time.sleep(0.001)


def test_only_messages_about_a_waiting_request_wait() -> None:
    its = Preparing()
    its.post(prompts(prompt("slow", "a"), prompt("free")))
    its.post(Cancel(requests=("slow",)))
    its.post(Cancel(requests=("free",)))
    assert its.names() == ["free", "free"]
    assert its.came[0] == Prefill(requests=(prompt("free"),), encoders=("to free",))
    its.factory.may_compile.set()
    its.wait_for(4)
    assert its.names()[2:] == ["slow", "slow"]
    assert isinstance(its.came[-1], Cancel)
    assert its.factory.threads == {"grammars"}


def test_a_grammar_that_is_compiled_waits_for_nothing() -> None:
    its = Preparing()
    its.factory.compiled.add("a")
    its.post(prompts(prompt("one", "a")))
    assert its.names() == ["one"]


def test_a_grammar_that_cannot_be_compiled_goes_on_to_fail_alone() -> None:
    its = Preparing()
    its.factory.may_compile.set()
    its.post(prompts(prompt("one", "bad")))
    its.post(prompts(prompt("two", "good")))
    its.wait_for(2)
    assert its.names() == ["one", "two"]


def test_what_waits_can_be_dropped() -> None:
    its = Preparing()
    its.post(prompts(prompt("one", "a")))
    its.preparation.drop()
    its.factory.may_compile.set()
    its.post(prompts(prompt("two", "b")))
    its.wait_for(1)
    time.sleep(0.05)
    assert its.names() == ["two"]


def test_the_thread_ends() -> None:
    its = Preparing()
    its.factory.may_compile.set()
    its.post(prompts(prompt("one", "a")))
    its.wait_for(1)
    thread = its.preparation._thread
    its.preparation.close()
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
