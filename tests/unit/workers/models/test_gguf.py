"""A GGUF gives back exactly the model it was made of; a hostile one gives an error."""

import json
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.effort import examples
from tests.unit.workers.models.conftest import FAMILIES
from triptych.core.errors import ModelError
from triptych.workers.models.facts import describe
from triptych.workers.models.store.convert import ARCHITECTURES, convert
from triptych.workers.models.store.gguf import read_header
from triptych.workers.models.store.safe_files import ignore_progress

SaveModel = Callable[[PreTrainedConfig], Path]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Llama's query and key."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def stored(
    name: str, weight: np.ndarray, config: PreTrainedConfig, architecture: str
) -> np.ndarray:
    if architecture == "llama" and ".q_proj." in name:
        return permuted(weight, config.num_attention_heads)
    if architecture == "llama" and ".k_proj." in name:
        return permuted(weight, config.num_key_value_heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    return weight


def write_settings(
    out: gguf.GGUFWriter, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> None:
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(getattr(config, "head_dim", None) or 8)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(10000.0)
    out.add_vocab_size(config.vocab_size)
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    out.add_tokenizer_model("llama" if config.model_type.startswith("gemma") else "gpt2")
    out.add_token_scores([0.0] * len(vocab))
    out.add_tokenizer_pre("smollm")
    out.add_token_list(vocab)
    out.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in vocab])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    out.add_token_merges([" ".join(pair) for pair in merges])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_pad_token_id(0)
    out.add_chat_template("{{ messages[0]['content'] }}")


@pytest.fixture
def write_gguf(
    tmp_path: Path, save_model: SaveModel, tokenizer: PreTrainedTokenizerFast
) -> Callable[[PreTrainedConfig, str], Path]:
    def write(config: PreTrainedConfig, architecture: str) -> Path:
        directory = save_model(config)
        model = AutoModelForCausalLM.from_pretrained(directory).to(torch.bfloat16).float()
        path = tmp_path / f"{architecture}.gguf"
        out = gguf.GGUFWriter(path, architecture)
        out.add_name("random")
        write_settings(out, config, tokenizer)
        arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
        names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        for name, weight in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            out.add_tensor(target, stored(name, weight.numpy(), config, architecture))
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
        return path

    return write


WriteGguf = Callable[[PreTrainedConfig, str], Path]


def test_converting_gives_back_the_weights(
    family: PreTrainedConfig, write_gguf: WriteGguf, tmp_path: Path
) -> None:
    architecture = {"mistral": "llama", "gemma3_text": "gemma3"}.get(
        family.model_type, family.model_type
    )
    if architecture not in ARCHITECTURES:
        pytest.skip("transformers has no GGUF reader for it")
    source = write_gguf(family, architecture)
    target = tmp_path / "converted"
    target.mkdir()
    reports = list[tuple[str, int, int]]()
    convert(source, target, lambda *report: reports.append(report))
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    converted = AutoModelForCausalLM.from_pretrained(target).float().state_dict()
    assert original.keys() == converted.keys()
    for name, weight in original.items():
        rounded = weight.to(torch.bfloat16).float()
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            torch.testing.assert_close(converted[name], rounded, atol=1e-2, rtol=0)
        else:
            torch.testing.assert_close(converted[name], rounded, atol=0, rtol=0)
    assert reports[-1][1] == reports[-1][2]


def test_the_tokenizer_and_chat_template_come_along(
    llama: PreTrainedConfig,
    write_gguf: WriteGguf,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    target = tmp_path / "converted"
    target.mkdir()
    convert(write_gguf(llama, "llama"), target, ignore_progress)
    ours = AutoTokenizer.from_pretrained(target)
    assert ours("the cat sat")["input_ids"] == tokenizer("the cat sat")["input_ids"]
    assert ours.decode(ours("äü 猫")["input_ids"]) == "äü 猫"
    assert ours.eos_token_id == 2
    assert ours.model_max_length == 256
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    digits = ours.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [text for text, _ in digits] == ["a", "ĠĠ", "1", "2"]


def test_every_architecture_is_one_that_gguf_names() -> None:
    assert set(ARCHITECTURES) <= set(gguf.MODEL_ARCH_NAMES.values())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out: out.add_tensor("rope_freqs.weight", np.ones(4, np.float32)), "8 positive"),
        (lambda out: out.add_tensor("rope_freqs.weight", -np.ones(8, np.float32)), "8 positive"),
        (lambda out: out.add_uint16("split.count", 3), "one of 3 files of a split model"),
        (lambda out: out.add_tensor("blk.0.odd.weight", np.ones(4, np.float32)), "without a place"),
        (lambda out: out.add_string("llama.rope.scaling.type", "yarn"), "with yarn scaling"),
    ],
    ids=["few factors", "negative factors", "split", "unknown tensor", "yarn"],
)
def test_nothing_in_the_file_is_silently_left_out(
    change: Callable[[gguf.GGUFWriter], None],
    reason: str,
    llama: PreTrainedConfig,
    write_gguf: WriteGguf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = gguf.GGUFWriter.add_name

    def add_name(out: gguf.GGUFWriter, name: str) -> None:
        original(out, name)
        change(out)

    monkeypatch.setattr(gguf.GGUFWriter, "add_name", add_name)
    target = tmp_path / "converted"
    target.mkdir()
    with pytest.raises(ModelError, match=reason):
        convert(write_gguf(llama, "llama"), target, ignore_progress)


def test_rope_factors_of_the_file_are_in_the_config(
    llama: PreTrainedConfig,
    write_gguf: WriteGguf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llama.rope_parameters = deepcopy(FAMILIES["llama, tied, llama3 rope"].rope_parameters)
    scaled = LlamaRotaryEmbedding(llama).inv_freq
    plain = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    original = gguf.GGUFWriter.add_name

    def add_name(out: gguf.GGUFWriter, name: str) -> None:
        original(out, name)
        out.add_tensor("rope_freqs.weight", (plain / scaled).numpy())

    monkeypatch.setattr(gguf.GGUFWriter, "add_name", add_name)
    target = tmp_path / "converted"
    target.mkdir()
    convert(write_gguf(llama, "llama"), target, ignore_progress)
    read = describe(target)
    assert read.plain is not None
    assert read.plain.frequencies == pytest.approx(scaled.tolist(), rel=1e-5)
    assert read.plain.rotary_scale == 1.0
    assert read.context_tokens == 256
    assert min(scaled / plain) < 0.2


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(header(metadata=[string("general.architecture", "mamba")]))
    with pytest.raises(ModelError, match=r"mamba.*have.*llama"):
        convert(path, tmp_path, ignore_progress)


# ------------------------------------------------------------------ hostile headers


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def string(key: str, value: str) -> bytes:
    return text(key) + struct.pack("<I", 8) + text(value)


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def tensor(
    name: str = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, n: int = 0
) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", n or len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def header(
    metadata: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: int = 4096,
) -> bytes:
    metadata, tensors = metadata or [], tensors or []
    n_tensors, n_entries = counts or (len(tensors), len(metadata))
    start = magic + struct.pack("<IQQ", version, n_tensors, n_entries)
    return start + b"".join(metadata) + b"".join(tensors) + bytes(data)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "not gguf": (header(magic=b"GGML"), "not a GGUF"),
    "version 1": (header(version=1), "version 1"),
    "big endian": (header(version=3 << 24), "version"),
    "2**63 tensors": (header(counts=(1 << 63, 0)), "tensors: the limit"),
    "2**63 entries": (header(counts=(0, 1 << 63)), "entries: the limit"),
    "a key of 2**63 bytes": (header(counts=(0, 1), data=0) + b"\xff" * 8, "string bytes"),
    "an array of 2**62 items": (
        header(counts=(0, 1), data=0) + text("a") + struct.pack("<IIQ", 9, 4, 1 << 62),
        "array items",
    ),
    "an array of arrays": (
        header(counts=(0, 1), data=0) + text("a") + struct.pack("<IIQ", 9, 9, 2),
        "type 9",
    ),
    "an unknown type": (
        header(counts=(0, 1), data=0) + text("a") + struct.pack("<I", 77) + bytes(64),
        "type 77",
    ),
    "one key twice": (header([string("a", "b"), string("a", "c")]), "twice"),
    "alignment 2**31": (header([number("general.alignment", 1 << 31)]), "alignment"),
    "alignment 0": (header([number("general.alignment", 0)]), "alignment"),
    "2**32 dimensions": (header(tensors=[tensor(n=0xFFFFFFFF)]), "dimensions"),
    "no dimensions": (header(tensors=[text("t") + struct.pack("<I", 0)]), "dimensions"),
    "a dimension of 0": (header(tensors=[tensor(dims=(32, 0))]), "shape"),
    "a tensor of 2**126 values": (
        header(tensors=[tensor(dims=(1 << 63, 1 << 63))]),
        "past the end",
    ),
    "half a block": (header(tensors=[tensor(dims=(33,), kind=3)]), "blocks of 32"),
    "an unknown tensor type": (header(tensors=[tensor(kind=4000)]), "type 4000"),
    "past the end": (header(tensors=[tensor(offset=4096)]), "past the end"),
    "an offset of 2**64 - 32": (header(tensors=[tensor(offset=(1 << 64) - 32)]), "past the end"),
    "an unaligned offset": (header(tensors=[tensor(offset=8)]), "not aligned"),
    "one tensor twice": (header(tensors=[tensor(), tensor(offset=128)]), "twice"),
    "overlapping tensors": (header(tensors=[tensor("a"), tensor("b", offset=96)]), "overlaps"),
}


@pytest.mark.parametrize(("content", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        read_header(path)


SOUND = header(
    [string("general.architecture", "llama"), number("llama.block_count", 2)],
    [tensor("a", (64, 2), 3), tensor("b", (32,), 0, 128)],
)


def test_a_sound_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sound.gguf"
    path.write_bytes(SOUND)
    found = read_header(path)
    assert found.metadata == {"general.architecture": "llama", "llama.block_count": 2}
    assert [(t.name, t.shape, t.size_bytes) for t in found.tensors.values()] == [
        ("a", (2, 64), 80),
        ("b", (32,), 128),
    ]
    assert all(t.offset % 32 == 0 for t in found.tensors.values())


@given(place=st.integers(0, 255), change=st.integers(1, 255), length=st.integers(0, len(SOUND)))
@settings(max_examples=examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_is_read_or_refused_and_nothing_else(
    place: int, change: int, length: int, tmp_path: Path
) -> None:
    damaged = bytearray(SOUND)
    damaged[place % (len(SOUND) - 4096)] ^= change
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged[:length] if place % 2 else damaged)
    try:
        found = read_header(path)
    except ModelError:
        return
    assert all(t.offset + t.size_bytes <= path.stat().st_size for t in found.tensors.values())
