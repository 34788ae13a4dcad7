"""What can be served is described exactly; what cannot is refused with a reason."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    JambaConfig,
    PreTrainedConfig,
    T5Config,
)

from tests.families import FAMILIES
from tests.unit.workers.models.test_families import save
from triptych.core.errors import ModelError
from triptych.core.layout import Geometry
from triptych.workers.models.facts import describe
from triptych.workers.models.fused.model import FusedModel
from triptych.workers.models.hf_model import HFModel
from triptych.workers.models.load import load
from triptych.workers.models.traits import HEAD
from triptych.workers.models.weights.linear import Packings
from triptych.workers.models.weights.plain_weights import drop_read_pages, read_plain

SaveModel = Callable[[PreTrainedConfig], Path]


def test_a_description_reads_no_values_of_weights(
    llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    path = save_model(llama)
    file = path / "model.safetensors"
    size, header = file.stat().st_size, 8 + int.from_bytes(file.read_bytes()[:8], "little")
    os.truncate(file, header)
    os.truncate(file, size)
    facts = describe(path)
    assert facts.geometry == Geometry(layers=3, kv_heads=2, head_dim=16)
    assert (facts.num_heads, facts.context_tokens, facts.vocab_size) == (6, 256, 320)
    assert facts.eos_token_ids == (2,)


def test_each_layers_window_scale_and_softcap_are_what_transformers_passes(
    family: PreTrainedConfig, save_model: SaveModel
) -> None:
    layers = describe(save_model(family)).layers
    expected = {
        "qwen2": [5 if kind == "sliding_attention" else 0 for kind in family.layer_types]
        if family.model_type == "qwen2"
        else [],
        "mistral": [7, 7, 7],
        "gemma2": [6, 0, 6],
        "gemma3_text": [6, 0, 6],
    }
    windows = [layer.window for layer in layers]
    assert windows == expected.get(family.model_type, [0, 0, 0])
    assert {layer.softcap for layer in layers} == {2.0 if family.model_type == "gemma2" else 0.0}


def test_several_end_tokens_come_from_the_generation_settings(
    llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    path = save_model(llama)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert describe(path).eos_token_ids == (2, 7)


def test_weights_come_in_the_type_that_was_asked_for(
    llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    path = save_model(llama)
    for name in ("float32", "bfloat16"):
        loaded = load(path, name, fused=False).network
        assert isinstance(loaded, HFModel)
        model = loaded.model
        assert {weight.dtype for weight in model.parameters()} == {getattr(torch, name)}
        assert not model.training
        assert not any(weight.requires_grad for weight in model.parameters())
        # Fused norms keep float32.
        network = load(path, name, quantization="none").network
        assert 1 <= network.step_bytes / loaded.step_bytes < 1.01


def test_the_second_process_describes_and_loads_plain_layers_without_transformers(
    llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    path = save_model(llama)
    load(path, "float32")
    code = (
        "import sys; from pathlib import Path; from triptych.workers.models.load import load;"
        "loaded = load(Path(sys.argv[1]), 'float32'); print('transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_what_is_known_of_a_model_changes_with_its_settings(
    llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    path = save_model(llama)
    before = describe(path)
    assert describe(path) == before
    settings = json.loads((path / "config.json").read_text())
    settings |= {"max_position_embeddings": 77, "rms_norm_eps": 1e-3}
    (path / "config.json").write_text(json.dumps(settings))
    after = describe(path)
    assert after.context_tokens == 77
    assert before.plain is not None
    assert after.plain == replace(before.plain, norm_epsilon=1e-3)


def test_weights_under_other_names_are_read_by_transformers(
    llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    """Models that were saved without their head lack the beginning of every name."""
    llama.tie_word_embeddings = True
    path = save_model(llama)
    plain = describe(path).plain
    assert plain is not None
    direct = read_plain(path, plain, "float32", "cpu")
    file = path / "model.safetensors"
    weights = {name.removeprefix("model."): part for name, part in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    found = read_plain(path, plain, "float32", "cpu")
    assert set(direct) == set(found) == plain.tensors.keys() - {HEAD}
    assert all(torch.equal(found[name], part) for name, part in direct.items())


def test_the_revision_changes_with_one_weight(
    llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    path = save_model(llama)
    before = describe(path).revision
    assert describe(path).revision == before
    model = AutoModelForCausalLM.from_pretrained(path)
    for weight in model.parameters():
        weight.data.add_(1e-3)
    model.save_pretrained(path)
    assert describe(path).revision != before


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(d_model=16, num_layers=1, num_heads=2), "encoder-decoder"),
        (BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1), "looks ahead"),
        (
            JambaConfig(hidden_size=32, num_hidden_layers=8, use_mamba_kernels=False),
            "layers of kind linear_attention",
        ),
    ],
    ids=["encoder-decoder", "encoder", "state-space"],
)
def test_what_cannot_be_served_is_refused_with_a_reason(
    config: PreTrainedConfig, reason: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        describe(tmp_path)


def test_the_context_ends_where_rope_would_change_with_the_longest_sequence(
    llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    llama.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.5] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    }
    facts = describe(save_model(llama))
    assert facts.context_tokens == 64
    assert facts.plain is not None
    assert facts.plain.frequencies[0] == pytest.approx(1 / 1.5)


def test_a_config_with_settings_of_wrong_types_is_an_error_of_ours(
    llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    path = save_model(llama)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"num_attention_heads": "six"}))
    with pytest.raises(ModelError, match="no usable config"):
        describe(path)


def test_pickled_weights_are_never_loaded(llama: PreTrainedConfig, save_model: SaveModel) -> None:
    path = save_model(llama)
    for file in path.glob("*.safetensors"):
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ModelError, match="never loaded"):
        load(path, "float32")


def test_code_in_the_directory_is_never_run(
    llama: PreTrainedConfig, save_model: SaveModel, tmp_path: Path
) -> None:
    path = save_model(llama)
    settings = json.loads((path / "config.json").read_text())
    settings |= {"model_type": "ours", "auto_map": {"AutoConfig": "evil.Config"}}
    (path / "config.json").write_text(json.dumps(settings))
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match="no usable config"):
        load(path, "float32")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["Gemma 2", "Mixtral", "Gemma 3", "GPT-2"])
def test_weights_of_any_family_are_checked_before_anything_starts(
    name: str, tmp_path: Path
) -> None:
    save(FAMILIES[name](), tmp_path)
    describe(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    last = max(one for one in weights if ".1." in one and "vision" not in one)
    save_file(
        {**weights, last: torch.zeros(3, *weights[last].shape)}, file, metadata={"format": "pt"}
    )
    with pytest.raises(ModelError, match=r"has shape \[3|weights are missing"):
        describe(tmp_path)
    del weights[last]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="weights are missing"):
        describe(tmp_path)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(
    missing: str, llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    path = save_model(llama)
    (path / missing).unlink()
    with pytest.raises(ModelError, match=str(path)):
        load(path, "float32")


def test_weights_cut_short_are_an_error(llama: PreTrainedConfig, save_model: SaveModel) -> None:
    path = save_model(llama)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(ModelError, match=r"model.safetensors: has .* download it again"):
        load(path, "float32")


def test_weights_that_are_missing_are_not_made_up(
    llama: PreTrainedConfig, save_model: SaveModel
) -> None:
    path = save_model(llama)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing.*up_proj"):
        load(path, "float32")


def resident_bytes(path: Path) -> int:
    """Of the weight files of a model in this process."""
    parts = Path("/proc/self/smaps").read_text().split("VmFlags:")
    found = [part for part in parts if str(path.resolve() / "model.safetensors") in part]
    return sum(int(part.split("Rss:")[1].split()[0]) << 10 for part in found)


def test_packed_weights_are_not_kept_in_memory_twice(tiny_model: Path) -> None:
    facts = describe(tiny_model)
    assert facts.plain is not None
    weights = read_plain(tiny_model, facts.plain, "float32", "cpu")
    network = FusedModel(facts, facts.plain, weights, Packings("dense", "dense"))
    embedded = network.embed(torch.arange(20))
    assert resident_bytes(tiny_model) > 0
    assert drop_read_pages(tiny_model) > 0
    assert resident_bytes(tiny_model) == 0
    assert torch.equal(network.embed(torch.arange(20)), embedded)


def test_pages_that_were_written_are_kept(tiny_model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    first = next(iter(weights.values()))
    first.fill_(3.0)
    drop_read_pages(copy)
    assert bool((first == 3.0).all())
