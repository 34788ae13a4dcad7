"""Text that is streamed is the text that is decoded at once, cut at the first stop."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.effort import examples
from triptych.core.messages import Sampling
from triptych.workers.models.tokenizer import FastTokenizer, from_json, to_json
from triptych.workers.sampling.detokenizer import IncrementalDetokenizer
from triptych.workers.sampling.token_bytes import incomplete_character, piece_bytes

WORDS = ("the", "cat", " the", " cat", " sat", "ing", ".", "é", "猫", "😀", "  ", "\n")


def byte_level() -> PreTrainedTokenizerFast:
    """All 256 bytes, some words, three special tokens: as in GPT-2, Llama 3, Qwen, SmolLM."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [to_bytes.pre_tokenize_str(word)[0][0] for word in WORDS]
    vocab = dict.fromkeys(alphabet + pieces)
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(vocab)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in "abc"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|a|>")


def sentencepiece() -> PreTrainedTokenizerFast:
    """Bytes as ``<0x41>``, spaces as ``▁``, none in front: as in Llama 2, Mistral, Gemma."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [word.replace(" ", "▁") for word in WORDS] + ["▁"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


TOKENIZERS = {"byte level": byte_level(), "sentencepiece": sentencepiece()}


@pytest.fixture(params=TOKENIZERS.values(), ids=TOKENIZERS.keys())
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return request.param


@cache
def copy_of(tokenizer: PreTrainedTokenizerFast) -> FastTokenizer:
    """The tokenizer as workers have it; reading it takes longer than streaming a text."""
    return from_json(to_json(tokenizer))


def encode(tokenizer: PreTrainedTokenizerFast, text: str, splits: list[bool]) -> list[int]:
    """Tokens of a text: a word where there is one, else bytes; ``splits`` forces bytes."""
    vocab, tokens = tokenizer.get_vocab(), list[int]()
    fallback = "<0x41>" in vocab
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for i, word in enumerate(text):
        piece = word.replace(" ", "▁") if fallback else to_bytes.pre_tokenize_str(word)[0][0]
        if piece in vocab and not splits[i % len(splits)]:
            tokens.append(vocab[piece])
        elif fallback:
            tokens += [vocab[f"<0x{byte:02X}>"] for byte in word.encode()]
        else:
            tokens += [vocab[char] for char in piece]
    return tokens


def whole(tokenizer: PreTrainedTokenizerFast, tokens: list[int], skip: bool = True) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def streamed(stream: IncrementalDetokenizer, tokens: list[int]) -> tuple[str, str | None]:
    text = ""
    for token in tokens:
        piece = stream.push(token)
        text += piece.text
        if piece.stop is not None:
            assert stream.finish() == ""
            return text, piece.stop
    return text + stream.finish(), None


@given(tokens=st.lists(st.integers(0, 270), max_size=60), skip=st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_any_bytes_stream_to_what_they_decode_to(tokens: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS["byte level"]
    stream = IncrementalDetokenizer(copy_of(tokenizer), Sampling(skip_special_tokens=skip))
    text = whole(tokenizer, tokens, skip)
    assert streamed(stream, tokens) == (
        text[: len(text) - ends_in_half(tokenizer, tokens, skip)],
        None,
    )


def ends_in_half(tokenizer: PreTrainedTokenizerFast, tokens: list[int], skip: bool) -> bool:
    """Whether more bytes could complete a character at the end."""
    special = {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
    kept = [token for token in tokens if not (skip and token in special)]
    names = tokenizer.convert_ids_to_tokens(kept)
    return incomplete_character(piece_bytes(name or "", byte_level=True) for name in names) > 0


TEXTS = st.text(st.sampled_from("the cat.é猫😀\n"), max_size=60)
SPLITS = st.lists(st.booleans(), min_size=1, max_size=5)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, splits=SPLITS)
@settings(max_examples=examples(200), deadline=None)
def test_any_text_streams_to_itself(name: str, text: str, splits: list[bool]) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = encode(tokenizer, text, splits)
    stream = IncrementalDetokenizer(copy_of(tokenizer), Sampling())
    assert streamed(stream, tokens) == (whole(tokenizer, tokens), None)


def cut(text: str, stops: tuple[str, ...], keep: bool) -> tuple[str, str | None]:
    """The definition: read on until the text ends in a stop; the longest of several."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(ending, key=len)
            return text[: end if keep else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    text=TEXTS,
    splits=SPLITS,
    stops=st.lists(st.text(st.sampled_from("the cat😀"), min_size=1, max_size=4), max_size=3),
    keep=st.booleans(),
)
@settings(max_examples=examples(300), deadline=None)
def test_the_answer_is_cut_at_the_stop_that_is_complete_first(
    name: str, text: str, splits: list[bool], stops: list[str], keep: bool
) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = encode(tokenizer, text, splits)
    stream = IncrementalDetokenizer(
        copy_of(tokenizer), Sampling(stop=tuple(stops), include_stop=keep)
    )
    assert streamed(stream, tokens) == cut(whole(tokenizer, tokens), tuple(stops), keep)


def test_characters_are_never_cut(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = IncrementalDetokenizer(copy_of(tokenizer), Sampling())
    tokens = encode(tokenizer, "a😀猫", [True])
    assert [stream.push(token).text for token in tokens] == ["a", "", "", "", "😀", "", "", "猫"]


def test_text_that_may_become_a_stop_is_held_back(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = IncrementalDetokenizer(copy_of(tokenizer), Sampling(stop=("cat.",)))
    tokens = encode(tokenizer, "a cat cat", [True])
    pieces = [stream.push(token).text for token in tokens]
    assert pieces == ["a", " ", "", "", "", "cat ", "", "", ""]
    assert stream.finish() == "cat"


CALL = '<tool_call>\n{"a": "</tool_call>o"}\n</tool_call>'


@pytest.mark.parametrize("stop", ["\n", "o", "{", "<", "<tool_call>", "}\n<", ">"])
@pytest.mark.parametrize("splits", [[True], [False]])
def test_stops_are_not_matched_inside_a_tool_call(
    tokenizer: PreTrainedTokenizerFast, stop: str, splits: list[bool]
) -> None:
    backend = copy_of(tokenizer)
    tokens = encode(tokenizer, f"cat {CALL}", splits)
    stream = IncrementalDetokenizer(backend, Sampling(stop=(stop,), tool_calls=True))
    assert streamed(stream, tokens) == (f"cat {CALL}", None)
    tokens += encode(tokenizer, f"cat{stop}cat", splits)
    stream = IncrementalDetokenizer(backend, Sampling(stop=(stop,), tool_calls=True))
    expected = f"cat {CALL}cat"
    if stop == "<tool_call>":  # opens a call
        assert streamed(stream, tokens) == (f"{expected}{stop}cat", None)
    else:
        assert streamed(stream, tokens) == (expected, stop)


@pytest.mark.parametrize("splits", [[True], [False]])
def test_a_stop_is_matched_inside_markup_of_an_answer_that_is_no_call(
    tokenizer: PreTrainedTokenizerFast, splits: list[bool]
) -> None:
    sampling = Sampling(stop=("cat",), tool_calls=True, tool_calls_first=True)
    for text, expected in ((f"{{{CALL} cat", f"{{{CALL} "), ("<tool_cat", "<tool_")):
        stream = IncrementalDetokenizer(copy_of(tokenizer), sampling)
        assert streamed(stream, encode(tokenizer, text, splits)) == (expected, "cat")
    stream = IncrementalDetokenizer(copy_of(tokenizer), sampling)
    assert streamed(stream, encode(tokenizer, f"{CALL}{CALL}", splits)) == (f"{CALL}{CALL}", None)


def test_a_stop_is_not_matched_across_the_border_of_a_call(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    stream = IncrementalDetokenizer(
        copy_of(tokenizer), Sampling(stop=("cat<", ">cat"), tool_calls=True)
    )
    text = f"cat{CALL}cat"
    assert streamed(stream, encode(tokenizer, text, [True])) == (text, None)


def test_a_space_in_front_of_the_answer_depends_on_what_it_continues() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    the = tokenizer.get_vocab()["▁the"]
    assert IncrementalDetokenizer(copy_of(tokenizer), Sampling()).push(the).text == "the"
    continued = IncrementalDetokenizer(copy_of(tokenizer), Sampling(), prompt_tail=[the])
    assert continued.push(the).text == " the"


@pytest.mark.parametrize("before", ["", "a", "猫", "é"])
@pytest.mark.parametrize("half", ["é", "猫", "😀"])
@pytest.mark.parametrize("splits", [[True], [False]])
def test_an_incomplete_character_at_the_end_is_dropped(
    tokenizer: PreTrainedTokenizerFast, before: str, half: str, splits: list[bool]
) -> None:
    for missing in range(1, len(half.encode())):
        stream = IncrementalDetokenizer(copy_of(tokenizer), Sampling())
        tokens = encode(tokenizer, before, splits) + encode(tokenizer, half, [True])[:-missing]
        assert streamed(stream, tokens) == (before, None)


def test_a_replacement_character_of_the_model_is_text(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = IncrementalDetokenizer(copy_of(tokenizer), Sampling())
    tokens = encode(tokenizer, "a\N{REPLACEMENT CHARACTER}", [True])
    assert streamed(stream, tokens) == ("a\N{REPLACEMENT CHARACTER}", None)


def test_a_token_costs_the_same_however_long_the_answer_is(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = IncrementalDetokenizer(copy_of(tokenizer), Sampling(stop=("never",)))
    decode, longest = stream._decoder._decode, 0

    def counting(tokens: list[int], *, skip_special_tokens: bool) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(stream._decoder, "_decode", counting)
    for token in encode(tokenizer, "the cat é猫😀" * 200, [True, False]):
        stream.push(token)
    assert longest <= 40
