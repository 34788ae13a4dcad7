"""``triptych top``: figures between two looks, and that they can be drawn."""

import json

from rich.console import Console

from tests.unit.cli.conftest import Run, Serve
from triptych.cli.serving.scrape import parse_metrics
from triptych.cli.serving.top_view import WAITING, WORKING, figures_between, render
from triptych.router.state.request_table import State

BEFORE = """\
triptych_num_requests_open 2.0
triptych_generation_tokens_total 100.0
triptych_prompt_tokens_total 1000.0
triptych_prompt_tokens_cached_total 0.0
triptych_time_to_first_token_seconds_sum 4.0
triptych_time_to_first_token_seconds_count 4.0
triptych_router_capacity_bytes 1000.0
triptych_router_booked_bytes 250.0
triptych_router_oldest_waiting_seconds 1.5
triptych_router_requests{state="waiting"} 3.0
triptych_router_requests{state="prefilling"} 1.0
triptych_router_requests{state="encoding"} 1.0
triptych_router_requests{state="compressed"} 1.0
triptych_router_requests{state="decoding"} 5.0
triptych_workers{stage="prefill"} 1.0
triptych_workers{stage="compress"} 1.0
triptych_workers{stage="decode"} 2.0
triptych_workers_busy_seconds{worker="prefill-ab"} 10.0
triptych_workers_busy_seconds{worker="decode-cd"} 20.0
triptych_workers_busy_seconds{worker="decode-ef"} 30.0
triptych_kv_raw_bytes_total 1000.0
triptych_kv_stored_bytes_total 300.0
triptych_pool_up 1.0
triptych_pool_page_bytes 4096.0
triptych_pool_pages_in_requests 10.0
triptych_pool_pages_in_prefixes 20.0
triptych_pool_pages_in_stock 30.0
triptych_pool_pages_free 40.0
"""
AFTER = (
    BEFORE.replace("tokens_total 100.0", "tokens_total 150.0")
    .replace("prompt_tokens_total 1000.0", "prompt_tokens_total 1200.0")
    .replace("cached_total 0.0", "cached_total 50.0")
    .replace("seconds_sum 4.0", "seconds_sum 5.0")
    .replace("seconds_count 4.0", "seconds_count 6.0")
    .replace('"prefill-ab"} 10.0', '"prefill-ab"} 11.0')
    .replace('"decode-cd"} 20.0', '"decode-cd"} 22.0')
)


def test_rates_are_those_between_two_looks() -> None:
    shown = figures_between(parse_metrics(AFTER), parse_metrics(BEFORE), seconds=2.0)
    assert (shown.written_per_s, shown.read_per_s) == (25, 100)
    assert shown.cached_share == 0.25
    assert shown.first_token_s == 0.5
    assert shown.between_tokens_s is None
    assert (shown.answers, shown.booked, shown.compression) == (2, 0.25, 0.3)
    assert shown.pages == {"requests": 10, "prefixes": 20, "stock": 30, "free": 40}


def test_stages_tell_who_waits_and_who_works() -> None:
    shown = figures_between(parse_metrics(AFTER), parse_metrics(BEFORE), seconds=2.0)
    told = {one.name: (one.workers, one.waiting, one.working, one.busy) for one in shown.stages}
    assert told == {
        "prefill": (1, 3, 1, 0.5),
        "compress": (1, 0, 1, None),
        "decode": (2, 1, 5, 0.5),
    }


def test_every_state_of_a_living_request_is_counted_once() -> None:
    counted = [
        state for table in (WAITING, WORKING) for states in table.values() for state in states
    ]
    assert sorted(counted) == sorted(set(State) - {State.ORPHANED, State.LEAVING})


def test_a_server_that_started_anew_has_no_negative_rates() -> None:
    shown = figures_between(parse_metrics(BEFORE), parse_metrics(AFTER), seconds=1.0)
    assert shown.written_per_s == shown.read_per_s == 0
    assert all(one.busy in (None, 0) for one in shown.stages)


def test_a_frame_fits_into_a_terminal() -> None:
    shown = figures_between(parse_metrics(AFTER), parse_metrics(BEFORE), seconds=2.0)
    console = Console(width=100, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(render(shown, "http://127.0.0.1:8000"))
    text = captured.get()
    assert "25.0 tokens/s written" in text
    assert "first token 500 ms" in text
    assert "100 pages of 4096 bytes; 25% of what requests may book is booked" in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100


def test_a_pool_that_is_gone_is_said() -> None:
    shown = figures_between(parse_metrics(AFTER.replace("pool_up 1.0", "pool_up 0.0")), None, 0.0)
    assert shown.pages == {}
    console = Console(width=100)
    with console.capture() as captured:
        console.print(render(shown, "url"))
    assert "the pool does not answer" in captured.get()


def test_the_command_shows_as_many_looks_as_wanted(serve: Serve, run: Run) -> None:
    server = serve([3, 4])
    code, out, _ = run("top", "--url", server.url, "--looks", "2", "--interval", "0.2", "--json")
    assert code == 0
    assert [json.loads(line)["answers"] for line in out.splitlines()] == [3, 4]


def test_every_sample_is_printed_into_a_pipe(serve: Serve, run: Run) -> None:
    url = serve([3, 4]).url
    code, out, _ = run("top", "--url", url, "--looks", "2", "--interval", "0.2")
    assert code == 0
    assert "3 answers in progress" in out
    assert "4 answers in progress" in out


def test_without_a_server_it_says_so(run: Run) -> None:
    code, _, err = run("top", "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "is a server there?" in err
