"""API keys from a file, with limits for each key.

The file holds SHA-256 digests, so that reading it gives no access::

    - name: alice
      sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
      max_concurrent_requests: 8
      requests_per_minute: 60
      weight: 2
      admin: true

The file is read again when it changes, so keys can be added and removed while the server runs.
"""

import hashlib
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar, cast

import yaml

from triptych.core.errors import (
    ConfigError,
    FloorNotMet,
    InvalidKey,
    NotAllowed,
    RequestError,
    TooManyRequests,
)
from triptych.core.messages import Floor
from triptych.core.methods.frontier import check_max_kl
from triptych.core.pages import PagePlan
from triptych.core.schema import SchemaError, build
from triptych.deployments.http.interfaces import AUTO

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
RETRY_AFTER_S = 1.0
MAX_FILE_BYTES = 16 << 20
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1000.0
NO_KEY = "this server wants an API key: send it as 'Authorization: Bearer ...'"
NO_ADMIN = (
    "no client may: set ingress.api_keys and mark a key 'admin: true', or set ingress.open_admin "
    "if all clients that can connect may"
)
WRONG_KEY = "this API key is not known here"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key and its limits, as in the file."""

    name: str
    """Name of the key in logs, and the tenant that its cached prefixes count for."""
    sha256: str
    """SHA-256 digest of the key, in hexadecimal digits."""
    max_concurrent_requests: int = 0
    """Concurrent requests, each choice of each prompt counted; 0: no limit."""
    requests_per_minute: int = 0
    """Average rate, and size of a burst, each choice of each prompt counted; 0: no limit."""
    weight: float = 1.0
    """Share of the server relative to other keys, counted as page bytes times seconds."""
    floor: Floor = "low"
    """Lowest class that may store tokens of its requests (``compressor.floor``)."""
    method: str = ""
    """Compression method of its requests that name none; empty: the server's default."""
    max_kl: float = 0.0
    """Largest KL that the method of its requests may have (``compressor.max_kl``); 0: any."""
    admin: bool = False
    """Whether the key may read router decisions and take profiles."""

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ConfigError(f"sha256={self.sha256[:80]!r}: expected 64 hexadecimal digits")
        if not 1 <= len(self.name) <= 64:
            raise ConfigError(f"name={self.name[:80]!r}: expected 1 to 64 characters")
        if min(self.max_concurrent_requests, self.requests_per_minute) < 0:
            raise ConfigError(f"limits of {self.name!r}: expected 0 or more")
        if not self.max_kl >= 0:
            raise ConfigError(f"max_kl={self.max_kl} of {self.name!r}: expected 0 or more")
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise ConfigError(
                f"weight={self.weight} of {self.name!r}: expected {LEAST_WEIGHT} to {MOST_WEIGHT}"
            )


@dataclass(slots=True)
class Use:
    """Running requests and rate allowance of a key."""

    running: int = 0
    """Requests that run."""
    allowance: float = 0.0
    """Requests that the rate limit allowed at ``counted_s``."""
    counted_s: float = 0.0
    """When a request was last counted; 0: never."""


class UsageTable(Protocol):
    """The use of each key."""

    def change(self, sha256: str) -> AbstractContextManager[Use]:
        """The present use of a key. Changes of the block count, unless it raises."""
        ...


class OwnUsage:
    """The use of each key at this replica alone."""

    def __init__(self) -> None:
        self._uses = dict[str, Use]()

    def change(self, sha256: str) -> AbstractContextManager[Use]:
        return nullcontext(self._uses.setdefault(sha256, Use()))


@dataclass(eq=False)
class Client:
    """The client of one key."""

    tenant: str
    """Digest of the tenant that fair queueing and quotas count for; empty: the only one."""
    salt: str
    """Digest of the clients that share cached prefixes; empty: those without a credential."""
    key: Key | None = None
    refused: Callable[[], None] | None = None
    """Called for each request that exceeds a limit of the key."""
    clock: Callable[[], float] = time.monotonic
    usage: UsageTable = field(default_factory=OwnUsage)

    @property
    def weight(self) -> float:
        """Share of the server relative to other clients."""
        return self.key.weight if self.key else 1.0

    @property
    def floor(self) -> Floor:
        """Lowest class that may store tokens of its requests."""
        return self.key.floor if self.key else "low"

    @property
    def method(self) -> str:
        """Compression method of its requests that name none; empty: the server's default."""
        return self.key.method if self.key else ""

    @property
    def max_kl(self) -> float:
        """Largest KL that the method of its requests may have; 0: any."""
        return self.key.max_kl if self.key else 0.0

    @property
    def seen_tenant(self) -> str | None:
        """The tenant whose requests it may watch; None: those of all tenants."""
        return None if self.key is None or self.key.admin else self.tenant

    def count(self, requests: int = 1) -> None:
        """Count requests against the rate limit.

        Raises: TooManyRequests, with the time until they are allowed
        """
        rate = self.key.requests_per_minute if self.key else 0
        if not rate:
            return
        with self._change_use() as use:
            now = self.clock()  # in the block, so that replicas count in the order of time
            grown = use.allowance + (now - use.counted_s) * rate / 60 if use.counted_s else rate
            allowance = min(float(rate), grown)
            if allowance < requests:
                pause_s = (requests - allowance) * 60 / rate
                raise self._too_many(f"{rate} requests a minute", pause_s)
            use.allowance, use.counted_s = allowance - requests, now

    async def run(
        self, items: AsyncGenerator[T, None], choices: int = 1
    ) -> AsyncGenerator[T, None]:
        """Yield the items of one request, which counts as running until it ends.

        Each of its ``choices``, over all prompts, counts as a request; ``count`` counted one.

        Raises: TooManyRequests, before the request starts; RequestError if the key never allows it
        """
        async with aclosing(items):
            limit = self._check_size(choices)
            if limit:
                self._start(choices, limit)
            else:
                self.count(choices - 1)
            try:
                async for item in items:
                    yield item
            finally:
                if limit:
                    with self._change_use() as use:
                        use.running -= choices

    def _start(self, choices: int, limit: int) -> None:
        """Raises: TooManyRequests"""
        with self._change_use() as use:
            if use.running + choices > limit:
                raise self._too_many(f"{limit} requests at a time", RETRY_AFTER_S)
            use.running += choices
        try:
            self.count(choices - 1)
        except TooManyRequests:
            with self._change_use() as use:
                use.running -= choices
            raise

    def _change_use(self) -> AbstractContextManager[Use]:
        return self.usage.change(self.key.sha256 if self.key else "")

    def _check_size(self, choices: int) -> int:
        """The limit of concurrent requests; 0: none."""
        key = self.key
        limits = (key.max_concurrent_requests, key.requests_per_minute) if key else (0, 0)
        for limit, per in zip(limits, ("at a time", "a minute"), strict=True):
            if 0 < limit < choices:
                raise RequestError(
                    f"{choices} choices of all prompts count as as many requests, and this API key "
                    f"is good for {limit} {per}: lower n, or send fewer prompts",
                    "n",
                )
        return limits[0]

    def _too_many(self, limit: str, pause_s: float) -> TooManyRequests:
        if self.refused:
            self.refused()
        return TooManyRequests(limit, pause_s)


NO_CLIENT = Client("", "")
"""A client without a credential, where no key is needed."""


@dataclass
class KeyRing:
    """The keys of a file. Without one all requests are allowed, and all are of one tenant.

    A credential that nobody checks makes no tenant: whoever sends a new one with each request
    would have a share of the server for each. Cached prefixes are still shared only between equal
    credentials, since a proxy in front may have checked them.
    """

    path: Path | None = None
    clock: Callable[[], float] = time.monotonic
    refused: Callable[[], None] | None = None
    """Called for each request that exceeds a limit of its key."""
    usage: UsageTable = field(default_factory=OwnUsage)
    _clients: dict[str, Client] = field(default_factory=dict[str, Client])
    _stamp: tuple[int, int, int] = (0, 0, 0)
    _looked_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises: ConfigError if the file cannot be read"""
        if self.path is not None:
            self._stamp = _stamp_of(self.path)
            self._replace(read_keys(self.path))

    def client(self, authorization: str, *, counts: bool = True) -> Client:
        """The client of an ``Authorization`` header; ``counts``: count a request of it.

        Raises: InvalidKey; TooManyRequests
        """
        scheme, _, secret = authorization.strip().partition(" ")
        secret = secret.strip()
        if self.path is None:
            return Client("", _digest(f"{scheme.lower()} {secret}") if scheme else "")
        self._reload_if_changed(self.path)
        # Looked up by digest, so that the time of the lookup reveals nothing about the keys.
        found = self._clients.get(_digest(secret)) if scheme.lower() == "bearer" else None
        if found is None:
            raise InvalidKey(WRONG_KEY if secret else NO_KEY)
        if counts:
            found.count()
        return found

    def admin(self, authorization: str, *, everybody: bool) -> Client:
        """The client, if it is an administrator; ``everybody``: without a file all clients are.

        Raises: InvalidKey; NotAllowed, with the setting that would allow it
        """
        client = self.client(authorization, counts=False)
        if self.path is None and not everybody:
            raise NotAllowed(NO_ADMIN)
        if client.key is not None and not client.key.admin:
            raise NotAllowed(f"{client.key.name!r} is no admin: mark the key 'admin: true'")
        return client

    def _reload_if_changed(self, path: Path) -> None:
        """Read the file again if it changed; an invalid file is logged and ignored."""
        now = self.clock()
        if now - self._looked_s < POLL_INTERVAL_S:
            return
        self._looked_s = now
        try:
            stamp = _stamp_of(path)
            if stamp != self._stamp:
                self._replace(read_keys(path))
                self._stamp = stamp
                logger.info("API keys reloaded: %d", len(self._clients))
        except ConfigError as error:
            logger.error("API keys not reloaded: %s", error)

    def _replace(self, keys: Mapping[str, Key]) -> None:
        """Replace the keys; the counts of keys that stay are kept."""
        previous = self._clients
        self._clients = {}
        for digest, key in keys.items():
            tenant = _digest(f"name {key.name}")
            client = previous.get(digest) or Client(
                tenant, tenant, refused=self.refused, clock=self.clock, usage=self.usage
            )
            client.tenant, client.salt, client.key = tenant, tenant, key
            self._clients[digest] = client


def read_keys(path: Path) -> dict[str, Key]:
    """The keys of a file, by digest.

    Raises: ConfigError naming the entry
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: more than {MAX_FILE_BYTES} bytes")
        entries: object = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"ingress.api_keys={path}: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"ingress.api_keys={path}: expected a list of keys")
    keys = dict[str, Key]()
    for index, entry in enumerate(cast("list[object]", entries)):
        try:
            key = build(Key, entry)
        except (SchemaError, ConfigError) as error:
            raise ConfigError(f"ingress.api_keys={path}: entry {index}: {error}") from error
        if key.sha256 in keys:
            raise ConfigError(f"ingress.api_keys={path}: entry {index}: this key is there twice")
        keys[key.sha256] = key
    return keys


def check_methods(keys: Mapping[str, Key], plan: PagePlan) -> None:
    """Raise ConfigError if a server does not offer the method of a key, or none meets its limit."""
    offered = (*plan.by_method, *([AUTO] if plan.adaptive else []))
    for key in keys.values():
        if key.method and key.method not in offered:
            names = ", ".join(map(repr, offered))
            raise ConfigError(
                f"ingress.api_keys: method={key.method!r} of {key.name!r}: expected one of {names} "
                "(compressor.methods)"
            )
        try:
            check_max_kl(plan.fidelity, plan.by_method, key.max_kl, 0)
        except FloorNotMet as error:
            raise ConfigError(
                f"ingress.api_keys: max_kl={key.max_kl:g} of {key.name!r}: {error}"
            ) from error


def _stamp_of(path: Path) -> tuple[int, int, int]:
    try:
        facts = path.stat()
    except OSError as error:
        raise ConfigError(f"ingress.api_keys={path}: {error}") from error
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
