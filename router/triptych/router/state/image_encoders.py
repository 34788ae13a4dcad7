"""The encode workers: which one computes the features of a request's images."""

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b

from triptych.router.state.byte_ledger import are_peers
from triptych.router.state.load_index import LoadIndex
from triptych.router.state.membership import Membership
from triptych.router.state.request_table import Entry

AFFINITY_PIXELS = 8_388_608
"""Pixels that a worker may have in work beyond the least loaded one and still get a request whose
first image it probably has cached."""


@dataclass
class ImageEncoders:
    """Workers of the encode stage, and the images that they have in work.

    A request goes to the worker that the hash of its first image names, as long as that has not
    much more to do than others: so an image that comes again finds its features cached.

    Source: EPD disaggregation (encode stage); rendezvous hashing
    """

    membership: Membership
    load_index: LoadIndex
    without: dict[str, Entry] = field(default_factory=dict[str, Entry])
    """Requests that wait for a worker of the stage."""
    _pixels: Counter[str] = field(default_factory=Counter[str])
    _at: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    """Worker and pixels of each request whose images are being encoded."""

    def workers(self, arena: str | None = None) -> list[str]:
        """Addresses of the workers that take requests, of all or of the pool of one arena.

        Features are in host memory, which all workers of a pool read.
        """
        return [
            peer.address
            for peer in self.membership
            if "encode" in peer.registration.stages
            and self.load_index.is_fresh(peer.address)
            and (arena is None or are_peers(arena, peer.registration.arena))
        ]

    def choose(self, digest: bytes, arena: str) -> tuple[str, str] | None:
        """A worker for a request, by the digest of its first image, and the reason."""
        found = self.workers(arena)
        if not found:
            return None
        idlest = min(found, key=lambda one: (self._pixels[one], one))
        home = max(found, key=lambda one: blake2b(one.encode(), key=digest[:64]).digest())
        if self._pixels[home] <= self._pixels[idlest] + AFFINITY_PIXELS:
            return home, "affinity"
        return idlest, "fewest_pixels"

    def pixels_at(self, address: str) -> int:
        """Pixels that a worker has in work."""
        return self._pixels[address]

    def started(self, entry: Entry, address: str) -> None:
        """A request's images were sent to a worker."""
        self.ended(entry)
        pixels = sum(image.pixels for image in entry.request.images)
        self._at[entry.id] = address, pixels
        self._pixels[address] += pixels

    def ended(self, entry: Entry) -> None:
        """A request's images are encoded, or needed no more."""
        self.without.pop(entry.id, None)
        address, pixels = self._at.pop(entry.id, ("", 0))
        self._pixels[address] -= pixels
        if not self._pixels[address]:
            del self._pixels[address]
