"""The dashboard in a real browser, over a real server that works."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import chromium
from tests.e2e.conftest import free_port

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not chromium.is_here(),
        reason="needs a Chromium: Debian's chromium, or pip's PyQt6-WebEngine",
    ),
]

STEPS = "waiting prefilling prefilled compressing planned encoding compressed decoding"


def legend(kind: str) -> str:
    """How many pages the map shows of a kind."""
    mark = f"document.querySelector('#pagelegend [data-kind=\"{kind}\"]')"
    return f"Number({mark}?.textContent.replaceAll(',', '') ?? 0)"


@pytest.fixture(scope="module")
def server(start: Callable[..., Any]) -> Any:
    return start()


@pytest.fixture(scope="module")
def page(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Page]:
    with chromium.browse(free_port(), tmp_path_factory.mktemp("browser")) as page:
        page.go(f"{server.url}/dashboard")
        page.wait_for("document.body?.dataset.drawn >= 2")
        yield page


def test_the_chat_box_answers_and_says_what_compression_did(
    server: Any, page: chromium.Page
) -> None:
    page.run("""(() => {
      document.getElementById("prompt").value = "What is the capital of <b>Japan</b>?";
      document.getElementById("maxtokens").value = 24;
      document.getElementById("ask").requestSubmit();
    })()""")
    note = page.wait_for("document.querySelector('.said:last-child small').textContent", 150)
    assert "first token" in note
    assert "tokens/s" in note
    assert "compression" in note
    assert "x (diffkv" in note
    assert page.run("document.querySelector('.said:last-child span').textContent.length") > 3
    assert page.run("document.querySelectorAll('#log b').length") == 0
    assert page.complaints == []


def test_under_load_pages_change_colour_and_requests_pass_through(
    server: Any, page: chromium.Page, tmp_path: Path
) -> None:
    assert page.run("document.getElementById('health').textContent") == "serving"
    assert page.run("seen.kinds.length") >= 10_000
    crowd = server.crowd([f"Tale {n}. " + "The ship sailed on. " * 80 for n in range(3)], 160)
    page.wait_for(f"{legend('fp16')} > 0 && {legend('k8v4')} > 0", timeout_s=150)
    page.wait_for("document.getElementById('gantt').dataset.phases.includes('decoding')")
    page.screenshot(tmp_path / "load.png")
    page.run("document.querySelector('input[value=owner]').click()")
    page.run("document.querySelector('input[value=kind]').click()")
    crowd.join()
    page.wait_for(f"{legend('fp16')} === 0 && {legend('k8v4')} === 0")
    ways = page.run("state.requests.map(one => [one.end, one.tokens, one.steps.map(s => s[0])])")
    for end, tokens, way in ways[-3:]:
        assert (end, tokens) == ("finished", 160)
        assert way[:8] == STEPS.split(" ")  # behind it, it may have been taken over
    page.wait_for("document.querySelectorAll('#workers .ok').length === 3")
    assert page.complaints == []


def test_a_screen_of_any_scheme_shows_everything(
    server: Any, page: chromium.Page, tmp_path: Path
) -> None:
    """Nothing is wider than the page, whatever its width."""
    for is_dark in (False, True):
        page.dark(is_dark)
        page.run("drawPages()")
        page.screenshot(tmp_path / f"{is_dark}.png")
        assert (tmp_path / f"{is_dark}.png").stat().st_size > 20_000
    page.dark(False)
    width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for wide in (800, 1024, 1360):
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=wide,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        assert page.run(width) == 0, wide
    assert page.complaints == []
