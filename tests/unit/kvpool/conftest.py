"""A live pool process's parts in this process, small and quick to expire."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from triptych.core.config import PoolConfig
from triptych.kvpool import Access, PrefixSettings
from triptych.kvpool.rpc.client.in_process import LocalPool
from triptych.kvpool.rpc.client.pool_client import PoolClient
from triptych.kvpool.rpc.client.worker_pool import WorkerPool
from triptych.kvpool.rpc.server import PoolServer

PAGES, PAGE_BYTES = 4096, 256

Join = Callable[[str], WorkerPool]


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., PoolServer]]:
    servers = list[PoolServer]()

    def make(
        *,
        address: str = "",
        prefixes: PrefixSettings | None = None,
        outside: tuple[str, Access] | None = None,
        **settings: float,
    ) -> PoolServer:
        config = PoolConfig(
            **{"kv_cache_memory_bytes": PAGES * PAGE_BYTES, "extent_pages": 64, **settings}  # type: ignore[arg-type]
        )
        server = PoolServer(
            config,
            PAGE_BYTES,
            address=address,
            directory=tmp_path,
            prefixes=prefixes,
            outside=outside,
        )
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
def join_with(
    request: pytest.FixtureRequest,
    make_server: Callable[..., PoolServer],
    make_client: Callable[[PoolServer, str], PoolClient],
) -> Iterator[Callable[[PrefixSettings | None], Join]]:
    """Makes one pool, which is reached in each of the ways that there are; its books agree."""
    pools = list[LocalPool | PoolServer]()

    def make(prefixes: PrefixSettings | None) -> Join:
        if request.param == "local":
            local = LocalPool(PAGES, PAGE_BYTES, "bystander", prefixes)
            pools.append(local)
            return local.join
        address = "127.0.0.1:0" if request.param == "tcp" else ""
        server = make_server(address=address, prefixes=prefixes)
        pools.append(server)
        return lambda worker: make_client(server, worker)

    yield make
    for pool in pools:
        assert pool.check() == []
        if isinstance(pool, LocalPool):
            pool.close()


@pytest.fixture
def join(join_with: Callable[[PrefixSettings | None], Join]) -> Join:
    """Joins workers to one pool."""
    return join_with(None)


@pytest.fixture
def join_prefixes(join_with: Callable[[PrefixSettings | None], Join]) -> Join:
    """Joins workers to one pool that keeps prefixes, of 4 tokens a block, on 64 pages."""
    room = 64 * PAGE_BYTES
    return join_with(PrefixSettings(block_tokens=4, total_bytes=room, tenant_bytes=room))
