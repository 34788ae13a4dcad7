"""Decodes a frame, runs its call on the pool, and encodes the reply: no socket, no clock."""

from collections.abc import Callable
from typing import cast

from triptych.core.errors import MessageError, TriptychError
from triptych.core.messages import Message, pack, unpack
from triptych.kvpool.rpc import messages
from triptych.kvpool.rpc.local_pool import LockedPool, PoolCall

Run = Callable[[PoolCall[Message]], Message]
"""Runs a call, or refuses it."""


def answer(pool: LockedPool, frame: bytes) -> bytes:
    """Answer one frame. An error becomes the answer, and the call has changed nothing."""
    return answer_with(pool.call, frame, pool)


def answer_with(run: Run, frame: bytes, pool: LockedPool) -> bytes:
    """Answer one frame with what ``run`` returns; ``pool`` counts the frames that are refused."""
    try:
        return pack([run(_unpack_call(frame))])
    except TriptychError as error:
        if isinstance(error, MessageError):
            pool.count("refused_frames")
        return pack([messages.refusal(error)])


def _unpack_call(frame: bytes) -> PoolCall[Message]:
    """The one call of a frame.

    Raises: MessageError
    """
    calls = unpack(frame)
    if len(calls) != 1:
        raise MessageError(f"{len(calls)} messages in one frame: expected 1")
    (asked,) = calls
    if not isinstance(asked, PoolCall):
        raise MessageError(f"{type(asked).__name__} is not a question to the pool")
    return cast("PoolCall[Message]", asked)
