"""The ingress's links to the routers of all shards: submit and cancel attempts at requests."""

from collections.abc import Callable, Sequence
from functools import partial

from triptych.core.messages import Cancel, Confirm, Register, Request, Submit, submits
from triptych.deployments.app_plan import AppPlan
from triptych.deployments.transport.peer_channel import PeerChannel
from triptych.deployments.transport.router_link import RouterLink
from triptych.router import RequestAttempts, Shards
from triptych.router.frontend.shards import bytes_of, key_of, names_of


class ShardLinks:
    """One link to the router of each shard. The table of shards chooses the one to use.

    A request goes to the shard that is likely to have its prefix cached, and to another shard if
    that one is down, full, or refuses it.
    """

    def __init__(
        self,
        plan: AppPlan,
        channel: PeerChannel,
        register: Register,
        shards: Shards,
        *,
        on_found: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """``on_found`` is called when a router is connected, ``on_lost`` with its shard's name."""
        self._pages, self._shards = plan.pages, shards
        self._on_found, self._on_lost = on_found, on_lost
        self._draining = set[str]()
        """Shards whose router refuses new requests, since the application stops."""
        self._links = {
            shard: RouterLink(
                channel,
                register,
                address,
                on_found=partial(self._found, shard),
                on_lost=partial(self._lost, shard),
            )
            for shard, address in zip(names_of(plan.shards), plan.router_addresses, strict=True)
        }

    @property
    def are_draining(self) -> bool:
        """Whether no shard accepts a new request, since the application stops."""
        return len(self._draining) == len(self._links)

    def drain(self, address: str) -> None:
        """A router refuses new requests from now on, until it is replaced by another one."""
        self._draining |= {shard for shard, link in self._links.items() if link.router == address}

    def start(self) -> None:
        for link in self._links.values():
            link.start()

    def stop(self) -> None:
        for link in self._links.values():
            link.stop()

    def peer_lost(self, address: str) -> None:
        """The channel lost a peer; it may be one of the routers."""
        for link in self._links.values():
            link.lost(address)

    def forgotten(self, address: str) -> None:
        """A router does not know this ingress any more."""
        for link in self._links.values():
            if link.router == address:
                link.forgotten()

    def confirm(self, quiet: Sequence[RequestAttempts]) -> None:
        """Ask each router whether it has those of these attempts that it got.

        All are asked, with or without attempts: a router that has lost this ingress answers that.
        """
        for shard, link in self._links.items():
            there = (one.id for one in quiet if self._shards.where(one.request.id) == shard)
            if link.is_up:
                link.post(Confirm(requests=tuple(there)))

    def submit(self, attempts: Sequence[RequestAttempts]) -> list[RequestAttempts]:
        """Send the present attempts to routers; returns those for which none is connected."""
        by_shard, unsent = dict[str, list[Request]](), list[RequestAttempts]()
        for one in attempts:
            request = one.present()
            key = key_of(one.request, self._pages)
            shard = self._shards.place(one.request.id, key, bytes_of(request, self._pages))
            if shard is None:
                unsent.append(one)
            else:
                by_shard.setdefault(shard, []).append(request)
        for shard, requests in by_shard.items():
            for message in submits(requests):
                self._links[shard].post(message)
        return unsent

    def resubmit(self, attempts: RequestAttempts) -> bool:
        """Send an attempt that its shard refused to another one; False if all of them did."""
        shard = self._shards.pass_on(attempts.request.id)
        if shard is None:
            return False
        self._links[shard].post(Submit(request=attempts.present()))
        return True

    def abort(self, attempts: RequestAttempts) -> None:
        """Cancel the present attempt in its shard."""
        shard = self._shards.where(attempts.request.id)
        self._links[shard].post(Cancel(requests=(attempts.id,)))

    def abort_all(self, attempts: Sequence[RequestAttempts]) -> None:
        """Cancel these attempts, with one message for each shard whose router is connected."""
        for shard, link in self._links.items():
            there = [one for one in attempts if self._shards.where(one.request.id) == shard]
            if there and link.is_up:
                link.post(Cancel(requests=tuple(sorted(one.id for one in there))))

    def _found(self, shard: str) -> None:
        self._draining.discard(shard)
        self._shards.found(shard)
        self._on_found()

    def _lost(self, shard: str) -> None:
        self._shards.lost(shard)
        self._on_lost(shard)
