"""Quantized checkpoints answer as the weights that they stand for."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2MoeConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.families import FAMILIES
from tests.quantized import FORMATS, write_quantized
from tests.tiny import byte_tokenizer, save_tiny_model
from triptych.core.config import DType, Quantization
from triptych.core.errors import ModelError
from triptych.kernels import (
    BlockedProduct,
    Int4Tiles,
    Int8Product,
    multiplies_bytes,
    multiplies_tiles,
    multiplies_words,
)
from triptych.workers.models.facts import describe
from triptych.workers.models.fused.int4_block import Int4Block
from triptych.workers.models.fused.model import FusedModel
from triptych.workers.models.hf_model import HFModel
from triptych.workers.models.load import load, packings_of
from triptych.workers.models.weights.int4_grid import GROUP, GROUPS, find_grid, fit_grid
from triptych.workers.models.weights.linear import (
    EXPANDED_ROWS,
    BlockedLinear,
    Int4Linear,
    Int8Linear,
    Packings,
    RegisterLinear,
    TorchInt4Linear,
    pack,
    packed_block,
)
from triptych.workers.models.weights.plain_weights import open_weights

SaveModel = Callable[[PreTrainedConfig], Path]
FOUR_BITS = ["gptq", "awq", "w4a16", "w4a16-symmetric"]
TOKENS = torch.arange(2, 40)
INT4_KIND = Int4Linear if multiplies_words() else TorchInt4Linear
DENSE_KIND = BlockedLinear if BlockedProduct.takes(torch.bfloat16) else RegisterLinear
IN_4_BITS = Int4Tiles if multiplies_words() else TorchInt4Linear


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("original") / "model")


@pytest.fixture(scope="module")
def quantized(original: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantized")
    return {form: write_quantized(original, folder / form, form) for form in FORMATS}


def logits_of(path: Path, dtype: DType = "float32", quantization: Quantization = "none") -> Tensor:
    """Logits of transformers' layers, with the weights that ours read."""
    network = load(path, dtype, quantization=quantization).network
    assert isinstance(network, FusedModel)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return mixed[0].transpose(0, 1)

    with torch.inference_mode():
        return network(TOKENS, torch.arange(len(TOKENS)), attend, torch.arange(len(TOKENS)))


def expected(original: Path, weights: Path) -> Tensor:
    """Logits of transformers with dequantized weights."""
    model = LlamaForCausalLM.from_pretrained(original)
    model.load_state_dict(dict(open_weights(weights)))
    with torch.inference_mode():
        return model(TOKENS[None]).logits[0]


@pytest.mark.parametrize("form", FORMATS)
def test_a_weight_is_nearly_the_one_that_was_quantized(
    form: str, original: Path, quantized: dict[str, Path]
) -> None:
    read, before = open_weights(quantized[form]), load_file(original / "model.safetensors")
    assert set(read) == set(before)
    for name, weight in before.items():
        error = (read[name] - weight).norm() / weight.norm()
        largest = 0.12 if FORMATS[form][0].get("bits") == 4 or form.startswith("w4") else 0.04
        assert error <= (largest if name.endswith("_proj.weight") else 0), name


@pytest.mark.parametrize("form", FORMATS)
def test_a_quantized_model_computes_as_transformers_with_its_weights(
    form: str, original: Path, quantized: dict[str, Path]
) -> None:
    ours = logits_of(quantized[form])
    torch.testing.assert_close(ours, expected(original, quantized[form]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMATS)
def test_four_bits_stay_four_bits_if_nothing_is_lost(
    form: str, original: Path, quantized: dict[str, Path]
) -> None:
    network = load(quantized[form], "bfloat16").network
    assert isinstance(network, FusedModel)
    kinds = {type(product) for block in network._blocks for product in (block.qkv, block.down)}
    assert kinds == {IN_4_BITS if form in FOUR_BITS else DENSE_KIND}
    there = logits_of(quantized[form], "bfloat16", "auto")
    close = expected(original, quantized[form])
    assert (there - close).norm() / close.norm() < 0.03


def test_any_weights_can_be_kept_in_four_bits(original: Path) -> None:
    whole = load(original, "bfloat16").network
    small = load(original, "bfloat16", quantization="int4").network
    assert isinstance(whole, FusedModel)
    assert isinstance(small, FusedModel)
    of_layers = [network.step_bytes - network._head.size_bytes for network in (whole, small)]
    assert of_layers[1] < 0.35 * of_layers[0]
    head = Int8Linear if Int8Product.takes_here() else DENSE_KIND
    assert isinstance(small._head.rough, head)
    rounded = LlamaForCausalLM.from_pretrained(original)
    with torch.no_grad():
        for name, weight in rounded.named_parameters():
            if name.endswith("_proj.weight"):
                weight.copy_(fit_grid(weight.bfloat16()).weights())
    with torch.inference_mode():
        close = rounded(TOKENS[None]).logits[0]
    there = logits_of(original, "bfloat16", "int4")
    assert (there - close).norm() / close.norm() < 0.03


def test_layers_of_transformers_are_dequantized(tmp_path: Path, original: Path) -> None:
    config = Qwen2MoeConfig(
        vocab_size=258, hidden_size=128, intermediate_size=128, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    path = tmp_path / "moe"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((original / name).read_bytes())
    small = write_quantized(path, tmp_path / "small", "awq")
    network = load(small, "float32").network
    assert isinstance(network, HFModel)
    read = open_weights(small)
    weight = network.model.get_submodule("model.layers.1.self_attn.q_proj").weight
    torch.testing.assert_close(weight, read["model.layers.1.self_attn.q_proj.weight"])
    with pytest.raises(ModelError, match="int4 needs a CPU and plain layers"):
        load(small, "float32", quantization="int4")


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    path = tmp_path / "model"
    AutoModelForCausalLM.from_config(FAMILIES["GPT-OSS"]()).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    file = path / "model.safetensors"
    stored, expected = load_file(file), dict[str, Tensor]()
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(ModelError, match="in a way that is not read"):
        describe(path)
    configure(path, {"quant_method": "mxfp4"})
    assert describe(path).layers[0].window > 0
    network = load(path, "float32").network
    assert isinstance(network, HFModel)
    assert len(expected) == 4
    for name, weight in expected.items():
        torch.testing.assert_close(network.model.get_parameter(name), weight, rtol=0, atol=0)
    stored["model.layers.0.mlp.experts.down_proj_scales"] = scales[:, :-1].contiguous()
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(ModelError, match="down_proj: its quantized parts do not fit"):
        load(path, "float32")


# ------------------------------------------------------------------ the grid


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grid_of_a_quantized_weight_is_found_again(kind: str, dtype: torch.dtype) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(len(kind))) * 0.05
    form = GGMLQuantizationType[kind]
    stored = torch.from_numpy(dequantize(quantize(weight.numpy(), form), form))
    grid = fit_grid(stored.to(dtype), search=True)
    assert grid.is_exact
    error = (grid.weights() - stored).norm() / stored.norm()
    assert error < (1e-6 if dtype == torch.float32 else 2**-9)


@pytest.mark.parametrize("group", GROUPS)
def test_the_largest_groups_are_found(group: int) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(group))
    rounded = fit_grid(weight, group=group).weights()
    grid = find_grid(rounded.bfloat16())
    assert grid is not None
    assert grid.group == group
    rows = torch.randn(EXPANDED_ROWS + 5, 256, generator=torch.Generator().manual_seed(1))
    expected = rows @ rounded.T
    product = pack([rounded.bfloat16()], packing="int4_if_exact")
    assert isinstance(product, INT4_KIND)
    for kind in {INT4_KIND, TorchInt4Linear}:
        product = kind.of(grid, None, torch.bfloat16)
        for part in (rows, rows[:3]):
            found = product(part.bfloat16()).float()
            assert (found - expected[: len(part)]).norm() < 0.01 * expected[: len(part)].norm()


def test_a_default_model_keeps_its_bits(original: Path, quantized: dict[str, Path]) -> None:
    """Weights that were quantized to 4 bits are found without being told, others are left."""
    kinds = list[set[type]]()
    for path in (original, quantized["awq"]):
        network = load(path, "bfloat16").network
        assert isinstance(network, FusedModel)
        kinds.append({type(block.down) for block in network._blocks})
    assert kinds == [{DENSE_KIND}, {IN_4_BITS}]


def test_other_weights_lie_on_no_grid() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    assert find_grid(weight) is None
    grid = fit_grid(weight, search=True)
    assert not grid.is_exact
    steps = grid.step.repeat_interleave(GROUP, 1)
    assert ((grid.weights() - weight).abs() <= 0.75 * steps).all()


@pytest.mark.parametrize("value", [0.0, -0.25, 3.0])
def test_equal_weights_are_exact(value: float) -> None:
    weight = torch.full((16, 64), value)
    grid = fit_grid(weight, search=True)
    assert grid.is_exact
    assert torch.equal(grid.weights(), weight)


# ------------------------------------------------------------------ products


@pytest.mark.parametrize("columns", [64, 576, 1536, 2048])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it(
    columns: int, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(160, columns, generator=generator).bfloat16()
    bias = torch.randn(160, generator=generator).bfloat16() if with_bias else None
    product = pack([weight], [bias], "int4")
    assert isinstance(product, INT4_KIND)
    rows = torch.randn(37, columns, generator=generator).bfloat16()
    whole = product(rows)
    exact = rows.float() @ fit_grid(weight).weights().T
    exact = exact if bias is None else exact + bias.float()
    assert (whole - exact).norm() / exact.norm() < 0.01
    for count in (1, 2, 3, 7, 16, 33):
        assert torch.equal(product(rows[:count]), whole[:count]), count
    apart = torch.cat([rows, rows], 1)[:, columns:]
    assert torch.equal(product(apart), whole)


@pytest.mark.parametrize("outputs", [64, 960, 48])
def test_many_rows_are_multiplied_with_the_same_weights(outputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, 96, generator=generator).bfloat16()
    product = TorchInt4Linear.of(fit_grid(weight), None, torch.bfloat16)
    rows = torch.randn(EXPANDED_ROWS + 1, 96, generator=generator).bfloat16()
    few = torch.cat([product(part) for part in rows.split(13)])
    assert (product(rows) - few).float().norm() < 0.005 * few.float().norm()


def test_the_layout_of_torchs_packed_weights_is_known() -> None:
    assert packed_block() in (32, 64)


# ------------------------------------------------------------------ products in 8 bits

needs_x86 = pytest.mark.skipif(not Int8Product.takes_here(), reason="not a processor of x86")


@needs_x86
@pytest.mark.parametrize("family", ["Llama 3.x", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_8_bits_is_near_the_one_in_float32(
    family: str, dtype: DType, save_model: SaveModel
) -> None:
    path = save_model(FAMILIES[family]())
    exact, found = logits_of(path), logits_of(path, dtype, "int8")
    assert not torch.equal(found, exact)
    assert (found - exact).norm() < 0.04 * exact.norm()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_all_biases_are_added(quantization: Quantization, save_model: SaveModel) -> None:
    if quantization == "int8" and not Int8Product.takes_here():
        pytest.skip("not a processor of x86")
    config = FAMILIES["Llama 3.x"]()
    config.attention_bias = config.mlp_bias = True
    path = save_model(config)
    exact, found = logits_of(path), logits_of(path, "bfloat16", quantization)
    assert (found - exact).norm() < {"int8": 0.04, "int4": 0.3}[quantization] * exact.norm()


@needs_x86
def test_weights_in_8_bits_take_half_of_the_memory(original: Path) -> None:
    networks = [
        load(original, "bfloat16", quantization=quantization).network
        for quantization in ("none", "int8")
    ]
    assert networks[1].step_bytes < 0.6 * networks[0].step_bytes


@needs_x86
def test_prompts_in_8_bits_leave_answers_as_they_are(original: Path) -> None:
    networks = {
        prompts: load(original, "bfloat16", quantization="none", prompts=prompts).network
        for prompts in ("none", "int8")
    }
    plain, mixed = networks["none"], networks["int8"]
    assert isinstance(plain, FusedModel)
    assert isinstance(mixed, FusedModel)
    hidden, positions = plain.embed(TOKENS), torch.arange(len(TOKENS))

    def run(network: FusedModel) -> Tensor:
        return network.through(range(2), hidden, positions, values_alone)

    assert torch.equal(run(mixed.for_decode()), run(plain.for_decode()))
    assert torch.equal(run(plain.for_prefill()), run(plain))
    assert not torch.equal(run(mixed.for_prefill()), run(plain))
    assert (run(mixed.for_prefill()) - run(plain)).norm() < 0.04 * run(plain).norm()


def values_alone(layer: int, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    """Attention of tokens to themselves."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1)


@needs_x86
def test_prompts_in_8_bits_are_the_default_of_bfloat16_alone(original: Path) -> None:
    def is_mixed(dtype: DType, quantization: Quantization = "auto") -> bool:
        network = load(original, dtype, quantization=quantization, prompts="auto").network
        assert isinstance(network, FusedModel)
        hidden, positions = network.embed(TOKENS), torch.arange(len(TOKENS))
        runs = (network, network.for_prefill())
        outputs = (run.through(range(2), hidden, positions, values_alone) for run in runs)
        return not torch.equal(*outputs)

    # Tiles are as fast in 16 bits, and without VNNI codes are little faster.
    assert is_mixed("bfloat16") is (multiplies_bytes() and not multiplies_tiles())
    assert not is_mixed("float32")
    assert not is_mixed("float16")
    assert not is_mixed("bfloat16", "none")
    assert not is_mixed("bfloat16", "int8")


@pytest.mark.skipif(not multiplies_words(), reason="weights in 4 bits have no tiles here")
def test_prefill_alone_may_round_the_inputs_of_weights_in_4_bits(
    quantized: dict[str, Path],
) -> None:
    def rounds(network: FusedModel) -> bool:
        block = network._blocks[0]
        assert isinstance(block, Int4Block)
        parts = {part.rounds_inputs for part in (block.qkv, block.out, block.gate_up, block.down)}
        return parts == {True}

    for prompts, is_rounded in (("auto", True), ("none", False)):
        network = load(quantized["awq"], "bfloat16", prompts=prompts).network
        assert isinstance(network, FusedModel)
        assert rounds(network.for_prefill()) is is_rounded
        assert not rounds(network)
        assert not rounds(network.for_decode())


def test_a_process_keeps_what_its_stages_read() -> None:
    assert packings_of("dense", ["prefill"], in_int8=True) == Packings("int8", "dense")
    assert packings_of("dense", ["decode"], in_int8=True) == Packings("dense", "dense")
    both = packings_of("dense", ["prefill", "compress", "decode"], in_int8=True)
    assert both == Packings("dense", "dense", "int8")
    assert packings_of("int8", ["prefill", "decode"], in_int8=False) == Packings("int8", "int8")


def test_8_bits_need_a_processor_of_x86(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Int8Product, "takes_here", lambda: False)
    for setting in ({"quantization": "int8"}, {"prompts": "int8"}):
        with pytest.raises(ModelError, match="quantization: int8 needs a processor of x86"):
            load(original, "bfloat16", **setting)
    load(original, "bfloat16", prompts="auto")


def test_8_bits_need_plain_layers(original: Path) -> None:
    with pytest.raises(ModelError, match="int8 needs a CPU and plain layers"):
        load(original, "bfloat16", fused=False, quantization="int8")


# ------------------------------------------------------------------ what is refused


def configure(path: Path, scheme: object) -> None:
    body = json.loads((path / "config.json").read_text()) | {"quantization_config": scheme}
    (path / "config.json").write_text(json.dumps(body))


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq in the format 'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({}, "quant_method"),
    ],
)
def test_other_schemes_are_refused_by_name(tmp_path: Path, scheme: object, says: str) -> None:
    path = save_tiny_model(tmp_path / "model")
    configure(path, scheme)
    with pytest.raises(ModelError, match=says):
        describe(path)


def test_parts_that_do_not_fit_are_refused(tmp_path: Path, original: Path) -> None:
    path = write_quantized(original, tmp_path / "model", "awq")
    file = path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.mlp.up_proj.scales"
    weights[name] = weights[name][:, :-8].contiguous()
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj.weight: its quantized parts do not fit"):
        load(path, "float32")
