"""Blocks of a prompt in the units of the prefix cache, and the prompt as placement sees it."""

from dataclasses import dataclass
from hashlib import blake2b

from triptych.core.messages import Request, pack_tokens

KEY_BYTES, TOKEN_BYTES = 16, 4


def block_keys(packed: bytes, salt: str, block_tokens: int) -> tuple[bytes, ...]:
    """A key for each whole block of a prompt in which prefixes are kept, first to last.

    The key of a block hashes that of the block before it, so equal keys mean equal beginnings. The
    last token is always computed, so it is in no block. Prompts with different salts share nothing.
    ``packed``: the tokens, as ``pack_tokens`` writes them. ``block_tokens`` is 0 for methods that
    do not use the prefix cache: their prompts share nothing.
    """
    if not block_tokens:
        return ()
    step = block_tokens * TOKEN_BYTES
    found = list[bytes]()
    parent = salt.encode()
    for at in range(0, len(packed) - step, step):
        hashed = blake2b(packed[at : at + step], digest_size=KEY_BYTES)
        hashed.update(parent)
        parent = hashed.digest()
        found.append(parent)
    return tuple(found)


@dataclass(eq=False, slots=True)
class PromptToPlace:
    """A prompt as placement policies see it: its length, its time limit, and keys of its blocks."""

    request: Request
    ttft_s: float
    """TTFT limit of the request, or ``router.affinity_ttft_s`` if it has none."""
    block_tokens: int
    """Tokens of a block of the prefix cache; 0: the method does not use it."""
    keys_were_read: bool = False
    """Whether a placement policy used ``keys``: then the router records where it is sent."""
    _keys: tuple[bytes, ...] | None = None

    @property
    def tokens(self) -> int:
        return self.request.known_tokens

    @property
    def has_images(self) -> bool:
        return bool(self.request.images)

    @property
    def session(self) -> bytes:
        """Name of the conversation, unique over all clients; empty if there is none."""
        request = self.request
        if not request.session:
            return b""
        return f"{request.tenant}/{request.cache_salt}/{request.session}".encode()

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Keys of its blocks, for placement policies."""
        self.keys_were_read = True
        return self.block_keys()

    def block_keys(self) -> tuple[bytes, ...]:
        """Keys of its blocks that may be taken from the prefix cache."""
        if self._keys is None:
            request = self.request
            packed = pack_tokens(request.known_keys[: request.cached_at_most])
            salt = request.cache_salt
            if request.method:  # methods share no blocks
                salt = f"{request.method}/{salt}"
            self._keys = block_keys(packed, salt, self.block_tokens)
        return self._keys
