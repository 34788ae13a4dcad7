"""Errors cross the wire as data and come back as themselves, and as nothing else."""

import pytest

from triptych.core.errors import (
    ConfigError,
    MessageError,
    NotHeld,
    NotRegistered,
    PoolError,
    PoolExhausted,
    StaleHandle,
    TriptychError,
    WritesPending,
)
from triptych.core.messages import pack, unpack
from triptych.kvpool.rpc.messages import PoolRefused, refusal, refused


@pytest.mark.parametrize(
    "error",
    [
        PoolExhausted(9, 3),
        StaleHandle(7, "it ended"),
        NotHeld("decode-0", 2),
        NotRegistered("decode-0"),
        WritesPending("decode-0"),
        MessageError("not a frame"),
        PoolError("broken"),
    ],
)
def test_errors_survive_the_wire(error: TriptychError) -> None:
    [heard] = unpack(pack([refusal(error)]))
    again = refused(heard)
    assert (type(again), again.args, str(again)) == (type(error), error.args, str(error))


def test_an_error_without_a_place_in_the_table_is_a_pool_error_that_names_it() -> None:
    again = refused(refusal(ConfigError("odd")))
    assert type(again) is PoolError
    assert str(again) == "ConfigError: odd"


@pytest.mark.parametrize(
    "words",
    [
        PoolRefused(error="SystemExit", details=(1,)),
        PoolRefused(error="os:system", details=("true",)),
        PoolRefused(error="PoolExhausted", details=("9", "3")),
        PoolRefused(error="PoolExhausted", details=(9,)),
        PoolRefused(error="", details=()),
    ],
)
def test_other_words_construct_nothing(words: PoolRefused) -> None:
    with pytest.raises(MessageError, match="unknown refusal"):
        refused(words)
