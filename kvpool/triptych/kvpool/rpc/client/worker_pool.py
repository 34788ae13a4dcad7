"""All that a worker does with a pool."""

from triptych.kvpool.rpc.client.page_leases import PageLeases
from triptych.kvpool.rpc.client.prefix_access import PrefixAccess


class WorkerPool(PageLeases, PrefixAccess):
    """One worker's access to a pool; ``PoolClient`` and ``LocalPool`` make one."""
