# pyright: basic, reportPrivateUsage=false
# numba is untyped.
"""A request calls only kernels that a server of its method compiles when it starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import DIFFKV
from tests.unit.workers.test_local_server import config, greedy, prompt
from triptych.core.config import AppConfig
from triptych.core.methods.kernel_needs import kernel_needs
from triptych.kernels.codegen.kernel_cache import CalledKernels, EntryPoint
from triptych.kernels.precompile import find, groups
from triptych.workers.local import LocalServer

Settings = dict[str, dict[str, object]]
MODEL: Settings = {"model": {"name": "tiny", "dtype": "bfloat16", "quantization": "int4"}}
"""Weights as of the default model: on each processor of x86 steps are programs with them."""
SHORT = {"recent_window_tokens": 4}
BLOCKS = {"policy": "epicache", "block_tokens": 32, **SHORT}
SELECTION = {"method": "box", "budget_tokens": 0, "keep_fraction": 0.5, "dense_layers": 0}
SERVED: dict[str, Settings] = {
    "diffkv": {"compressor": {**DIFFKV}},
    "uniform": {"compressor": {"policy": "uniform:k8v4", **SHORT}},
    "fp16": {"compressor": {"policy": "uniform:fp16"}},
    "spherical": {"compressor": {"policy": "spherical", **SHORT}},
    "epicache": {"compressor": BLOCKS},
    "kvmerger": {"compressor": {"policy": "kvmerger", **SHORT}},
    "selection": {"compressor": {**DIFFKV}, "decode": {"selection": SELECTION}},
    "kivi": {"compressor": {"policy": "kivi", **SHORT}},
    "kvarn": {"compressor": {"policy": "kvarn", **SHORT}},
}
SLOW = {"selection", "kivi", "kvarn"}
"""Those whose kernels take more than a few seconds to compile."""


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SERVED]
)
def settings(request: pytest.FixtureRequest) -> AppConfig:
    return config(**MODEL | SERVED[request.param])


@pytest.fixture
def no_compilation(settings: AppConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that are not compiled for these settings, or not for such calls, are refused."""
    found = [find(name) for names in groups(kernel_needs(settings)) for name in names]
    entries = {id(one) for one in found if isinstance(one, EntryPoint)}
    calls = [call for one in found if isinstance(one, CalledKernels) for call in one.calls]
    functions = {function for function, _ in calls}
    read = EntryPoint.address.func

    def address(entry: EntryPoint) -> int:
        assert id(entry) in entries, f"{entry.name} is compiled at a request"
        if "address" not in entry.__dict__:
            entry.__dict__["address"] = read(entry)
        return entry.__dict__["address"]

    monkeypatch.setattr(EntryPoint, "address", property(address))
    for function in functions:
        function._reset_overloads()  # other tests call them with other types
    for function, arguments in calls:
        function.compile(arguments)
    for function in functions:
        function.disable_compile()
    yield
    for function in functions:
        function.disable_compile(False)


@pytest.mark.usefixtures("no_compilation")
def test_answers_need_no_other_compilation(settings: AppConfig, tiny_model: Path) -> None:
    with LocalServer(settings, tiny_model) as server:
        asked = [server.request(prompt(count), greedy(90)) for count in (3, 70, 130)]
        done = server.complete(asked)
    assert [len(one.tokens) for one in done] == [90] * 3
