# Ray's handles lack types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""``serve run`` that lets running requests finish when it is interrupted.

``serve run`` ends the HTTP proxies first, which cuts every stream. Here the first SIGINT has the
routers drain, while the proxies still answer; after that, or at the second SIGINT, Serve is shut
down. Usage: ``python -m triptych.deployments.serve_run CONFIG SECONDS``; SECONDS is how long the
routers may take.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

if __name__ == "__main__":  # an interrupt during the imports ends the process, without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from triptych.core.config.cache_dirs import environment_variable

ALIVE = ("DEPLOYING", "RUNNING", "UNHEALTHY")
"""States of applications that another server has."""
ANY, LOCAL = "auto", "local"
"""Addresses of Ray: one that runs on this machine; a new one, for this server alone."""
UNUSED = ("start_monitor", "start_api_server")
"""Methods of Ray's nodes that start processes which a server does not need."""
FLUSH_S = 0.5
"""Time for the last bytes of responses to reach their clients."""


class Interrupts:
    """The handler of SIGINT: drain first, then raise KeyboardInterrupt in the main thread."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain, self._count = drain, 0

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        """Raises: KeyboardInterrupt"""
        self._count += 1
        if self._count == 1:
            # In a thread, since a lock that the main thread holds must not be taken again in it.
            draining = Thread(target=self._drain, daemon=True)
            draining.start()
            draining.join()  # a second signal ends the wait
        raise KeyboardInterrupt


def drain_all(timeout_s: float) -> None:
    """Have the routers of all running applications drain; returns when they have.

    Applications that are still starting have no requests.
    """
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    if is_initialized is None or not is_initialized():  # it may be imported in part
        return
    try:
        calls = [router.drain.remote() for router in _routers()]
        for call in calls:
            call.result(timeout_s=timeout_s)
    except Exception as error:  # noqa: BLE001  # to stop is more important than to wait
        _tell(f"running requests are not waited for: {error}")
        return
    if calls:
        time.sleep(FLUSH_S)


def _applications() -> dict[str, Any]:
    """The applications that run, by name."""
    # Ray takes seconds to import, and an interrupt meanwhile must find the handler.
    from ray import serve  # noqa: PLC0415
    from ray.serve.exceptions import RayServeException  # noqa: PLC0415

    try:
        return serve.status().applications
    except RayServeException:  # Serve has not started
        return {}


def _routers() -> Iterator[Any]:
    from ray import serve  # noqa: PLC0415

    for name, application in _applications().items():
        for deployment, found in application.deployments.items():
            if deployment.partition("-")[0] == "Router" and found.status == "HEALTHY":
                yield serve.get_deployment_handle(deployment, name)


def main() -> None:
    """Run ``serve run`` until it is interrupted; its exit status is then 0."""
    config, seconds = sys.argv[1:]
    signal.signal(signal.SIGINT, Interrupts(lambda: drain_all(float(seconds))))
    try:
        _serve_run(config)
    except KeyboardInterrupt:
        _tell("stopped before the server had started")


def _serve_run(config: str) -> None:
    import click  # noqa: PLC0415
    from ray.serve.scripts import cli  # noqa: PLC0415

    address = environment_variable("RAY_ADDRESS")
    if address in ("", LOCAL):
        _start_ray(config, address)
        address = ANY  # the one that this process is connected to
    try:
        cli(["run", f"--address={address}", config], standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort as error:  # click's name for an interrupt
        raise KeyboardInterrupt from error


def _start_ray(config: str, address: str) -> None:
    """Connect to a running Ray, or start one if none runs or ``address`` is ``LOCAL``.

    A Ray that was not named may be that of another server, which is not replaced.
    """
    import ray  # noqa: PLC0415

    if address == LOCAL or not _connects():
        without_unused_processes()
        ray.init(LOCAL, namespace="serve", include_dashboard=False)
        return
    alive = {name for name, one in _applications().items() if one.status in ALIVE}
    taken = sorted(_names_in(config) & alive)
    if taken:
        address = ray.get_runtime_context().gcs_address
        _tell(
            f"Ray at {address} serves {', '.join(taken)} already: stop that server first, set "
            f"RAY_ADDRESS={address} to replace it, or RAY_ADDRESS=local for a Ray of its own"
        )
        sys.exit(1)


def _connects() -> bool:
    """Whether there is a running Ray, to which this process is then connected."""
    import ray  # noqa: PLC0415

    try:
        ray.init(ANY, namespace="serve")
    except ConnectionError:
        return False
    return True


def without_unused_processes() -> None:
    """Have a Ray that this process starts leave out two processes that a server does not need.

    One is its autoscaler, which starts and stops machines: here there is one. The other belongs to
    its dashboard and reports usage, even if the dashboard is left out. They take 130 MB, and
    seconds of the start. Whoever wants them starts Ray first. Ray has no setting for it.
    """
    from ray._private.node import Node  # noqa: PLC0415

    for name in UNUSED:
        if hasattr(Node, name):  # another version of Ray may start more than is necessary
            setattr(Node, name, _start_nothing)


def _start_nothing(*_: object, **__: object) -> None:
    """In the place of a method of ``UNUSED``."""


def _names_in(config: str) -> set[str]:
    """Names of the applications of a config file; none if Serve will refuse it."""
    import yaml  # noqa: PLC0415

    try:
        found = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
        return {str(one["name"]) for one in found["applications"]}
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return set()


def _tell(line: str) -> None:
    sys.stderr.write(f"triptych: {line}\n")


if __name__ == "__main__":
    main()
