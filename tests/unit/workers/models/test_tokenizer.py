"""The tokenizer without transformers gives what transformers gives."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from triptych.core.errors import ModelError
from triptych.workers.models.pretrained import read_tokenizer
from triptych.workers.models.tokenizer import FastTokenizer, open_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
Both = tuple[FastTokenizer, PreTrainedTokenizerFast]


def save_tokenizer(path: Path) -> Path:
    """One that puts <s> first, and cuts texts after five tokens where it is not told otherwise."""
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator(["the user and the assistant talk about the weather"], trainer)
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    rust.enable_truncation(5)
    PreTrainedTokenizerFast(
        tokenizer_object=rust, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    path = save_tokenizer(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPTYCH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return open_tokenizer(path), read_tokenizer(path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIPTYCH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


TEXTS = st.lists(st.one_of(st.text(max_size=20), st.sampled_from(SPECIAL))).map("".join)


@given(text=TEXTS, special=st.booleans())
@settings(deadline=None)
def test_ids_and_texts_are_those_of_transformers(both: Both, text: str, special: bool) -> None:
    fast, full = both
    ids = fast.encode(text, add_special_tokens=special)
    assert ids == full.encode(text, add_special_tokens=special)
    assert fast.convert_ids_to_tokens(ids) == full.convert_ids_to_tokens(ids)
    for skip in (False, True):
        assert fast.decode(ids, skip_special_tokens=skip) == full.decode(
            ids, skip_special_tokens=skip
        )


@given(contents=st.lists(TEXTS, min_size=1, max_size=3), ask=st.booleans())
@settings(deadline=None)
def test_chats_are_those_of_transformers(both: Both, contents: list[str], ask: bool) -> None:
    fast, full = both
    messages = [{"role": "user", "content": content} for content in contents]
    rendered = fast.apply_chat_template(messages, add_generation_prompt=ask)
    assert rendered == full.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)


def test_the_vocabulary_is_that_of_transformers(both: Both) -> None:
    fast, full = both
    assert len(fast) == len(full)
    assert fast.get_vocab() == full.get_vocab()
    assert {key: str(token) for key, token in fast.added_tokens_decoder.items()} == {
        key: str(token) for key, token in full.added_tokens_decoder.items()
    }
    assert fast.convert_ids_to_tokens([len(full) + 5]) == [None]


@pytest.mark.usefixtures("cache")
def test_the_second_time_nobody_imports_torch(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "model")
    first = open_tokenizer(path)
    code = (
        "import sys; from pathlib import Path; from triptych.workers.models.tokenizer import *;"
        "made = open_tokenizer(Path(sys.argv[1])); made.apply_chat_template([]);"
        "print('torch' in sys.modules, made.encode('the weather', add_special_tokens=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"False {first.encode('the weather', add_special_tokens=True)}"


def test_what_was_kept_is_made_anew_when_it_is_broken_or_of_other_files(
    cache: Path, tmp_path: Path
) -> None:
    path = save_tokenizer(tmp_path / "model")
    messages = [{"role": "user", "content": "hi"}]
    assert open_tokenizer(path).apply_chat_template(messages) == "<s><|user|>hi</s>"
    (kept,) = cache.iterdir()
    kept.write_text(kept.read_text()[:100])
    assert open_tokenizer(path).apply_chat_template(messages) == "<s><|user|>hi</s>"
    assert "backend" in json.loads(kept.read_text())
    (path / "chat_template.jinja").write_text("other")
    assert open_tokenizer(path).apply_chat_template(messages) == "other"
    assert len(list(cache.iterdir())) == 2


def test_the_same_file_in_another_folder_is_another_tokenizer(cache: Path, tmp_path: Path) -> None:
    """A template among additional ones is not the model's own."""
    path = save_tokenizer(tmp_path / "model")
    (path / "other.jinja").write_text("x")
    open_tokenizer(path)
    (path / "additional_chat_templates").mkdir()
    (path / "other.jinja").rename(path / "additional_chat_templates" / "other.jinja")
    open_tokenizer(path)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.usefixtures("cache")
def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path / "model")
    shutil.rmtree(path)
    path.mkdir()
    with pytest.raises(ModelError, match="tokenizer"):
        open_tokenizer(path)
