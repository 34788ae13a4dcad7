"""A worker that fetches from another node: NEAR DIRECTORY ARENA HOST CALLS PAGES TOKEN.

Reads a claim and page ids as JSON from its input; says the digest of what came.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from triptych.core.handles import LeaseRef
from triptych.kvpool import Access, Fetcher, PoolAddress, PoolClient


def main(
    near: str, directory: str, arena: str, host: str, calls: str, pages: str, token: str
) -> None:
    far = {arena: PoolAddress(host, int(calls), int(pages))}
    lease_ref, ids = json.loads(sys.stdin.readline())
    with PoolClient(near, "decode", directory=Path(directory)) as worker:
        fetcher = Fetcher(worker, far.get, Access(token))
        _, mine = fetcher.fetch("r", LeaseRef(*lease_ref), np.array(ids, np.int32))
        sys.stdout.write(hashlib.sha256(worker.arena.data[mine].tobytes()).hexdigest() + "\n")
        fetcher.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
