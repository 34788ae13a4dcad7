"""A live pool process's parts in this process, small and quick to expire."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from triptych.core.config import PoolConfig
from triptych.kvpool.client import LocalPool, PoolClient, WorkerPool
from triptych.kvpool.service import PoolServer

PAGES, PAGE_BYTES = 4096, 256

Join = Callable[[str], WorkerPool]


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., PoolServer]]:
    servers = list[PoolServer]()

    def make(*, address: str = "", **settings: float) -> PoolServer:
        config = PoolConfig(
            **{"capacity_bytes": PAGES * PAGE_BYTES, "extent_pages": 64, **settings}  # type: ignore[arg-type]
        )
        server = PoolServer(config, PAGE_BYTES, address=address, directory=tmp_path)
        servers.append(server)
        server.start()
        return server

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[Callable[[PoolServer | str, str], PoolClient]]:
    clients = list[PoolClient]()

    def make(server: PoolServer | str, worker: str) -> PoolClient:
        address = server if isinstance(server, str) else server.address
        client = PoolClient(address, worker, directory=tmp_path, connect_timeout_s=10)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture(params=["local", "unix socket", "tcp"])
def join(
    request: pytest.FixtureRequest,
    make_server: Callable[..., PoolServer],
    make_client: Callable[[PoolServer, str], PoolClient],
) -> Iterator[Join]:
    """Joins workers to one pool, which is reached in each of the ways that there are."""
    if request.param == "local":
        with LocalPool(PAGES, PAGE_BYTES, "bystander") as pool:
            yield pool.join
    else:
        address = "127.0.0.1:0" if request.param == "tcp" else ""
        server = make_server(address=address)
        yield lambda worker: make_client(server, worker)
