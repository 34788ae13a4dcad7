"""Documents that share nothing, within a split and across splits."""

from itertools import combinations

import pytest

from triptych.core.errors import ConfigError
from triptych.evals.data.texts import CODE, documents, prose, sources, text_hash


def encode(text: str) -> list[int]:
    return list(text.encode())


def paragraphs(text: str) -> set[str]:
    return {part.strip() for part in text.split("\n\n") if len(part.strip()) > 40}


def test_the_splits_share_no_paragraph_and_no_module() -> None:
    for one, other in combinations(CODE, 2):
        assert not paragraphs(prose(one)) & paragraphs(prose(other))
        assert not set(CODE[one]) & set(CODE[other])
        assert text_hash(one) != text_hash(other)


def test_all_topics_that_repeat_no_other_are_in_a_split() -> None:
    assert sum(len(paragraphs(prose(split))) for split in CODE) > 1000


def test_documents_come_from_the_texts_word_by_word_and_share_no_token() -> None:
    texts = dict(sources("evaluation"))
    found = documents(encode, "evaluation", context=3000, continuation=500, count=20)
    assert len({document.name for document in found}) == 20
    for document in found:
        source, _, start = document.name.partition("@")
        whole = bytes([*document.context, *document.continuation])
        at = int(start)
        assert texts[source].encode()[at : at + 3500] == whole
        assert at % 3500 == 0


def test_documents_are_prose_and_code_by_turns() -> None:
    found = documents(encode, "calibration", context=200, continuation=10, count=8)
    assert [one.name.startswith("pydoc@") for one in found] == [True, False] * 4
    assert len({one.name.partition("@")[0] for one in found}) == 5


def test_more_documents_than_there_are_is_an_error_that_says_how_many_there_are() -> None:
    with pytest.raises(ConfigError, match=r"the evaluation texts hold [1-9]"):
        documents(encode, "evaluation", context=100_000, continuation=1000, count=100)
