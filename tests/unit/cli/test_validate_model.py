"""``validate`` finds what loading a model, or starting the server with it, would refuse."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.tiny import save_tiny_model
from tests.unit.cli.conftest import Run
from triptych.cli.serving.serve_file import IMPORT_PATH

Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(tiny, tmp_path / "tiny")


def serve_text(tmp_path: Path, args: object, **other: object) -> str:
    app = {"name": "app", "import_path": IMPORT_PATH, "args": args}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [app], **other}))
    return str(path)


def shard(path: Path) -> None:
    """Split the checkpoint into two files with an index."""
    weights = load_file(path / "model.safetensors")
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: weights[name] for name in chosen}, path / file, {"format": "pt"})
    (path / "model.safetensors").unlink()
    weight_map = {name: file for file, chosen in parts.items() for name in chosen}
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def lose_a_shard(path: Path) -> None:
    shard(path)
    (path / "model-2.safetensors").unlink()


def lose_the_index_too(path: Path) -> None:
    lose_a_shard(path)
    (path / "model.safetensors.index.json").unlink()


def only_bin(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_the_header(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def quantize(path: Path, name: str, dtype: torch.dtype, ending: str = "weight") -> None:
    file = path / "model.safetensors"
    weights = load_file(file)
    first = f"model.layers.0.self_attn.{name}."
    weights[first + ending] = weights.pop(first + "weight").to(dtype)
    save_file(weights, file, {"format": "pt"})


def set_config(path: Path, **values: object) -> None:
    config = json.loads((path / "config.json").read_text()) | values
    (path / "config.json").write_text(json.dumps(config))


SPOILT: dict[str, tuple[Edit, str]] = {
    "only .bin": (only_bin, "no .safetensors file. Pickled weights"),
    "a missing shard": (lose_a_shard, "model-2.safetensors of 2 files in model.safetensors.index"),
    "a missing shard and no index": (lose_the_index_too, "weights are missing: "),
    "cut weights": (cut, "model.safetensors: has "),
    "a cut header": (cut_the_header, "not a safetensors file, or cut short"),
    "GPTQ tensors": (
        lambda path: quantize(path, "k_proj", torch.int32, "qweight"),
        "k_proj.qweight (I32) are quantized in a way that is not read",
    ),
    "FP8 tensors": (
        lambda path: quantize(path, "q_proj", torch.float8_e4m3fn),
        "q_proj.weight (F8_E4M3) are quantized in a way that is not read",
    ),
    "FP8 weights without scales": (
        lambda path: (
            quantize(path, "q_proj", torch.float8_e4m3fn),
            set_config(path, quantization_config={"quant_method": "fp8"}),
        ),
        "q_proj.weight (F8_E4M3) are quantized in a way that is not read",
    ),
    "a config of 3 bits": (
        lambda path: set_config(path, quantization_config={"quant_method": "gptq", "bits": 3}),
        "(gptq with 3 bits)",
    ),
    "a bitsandbytes config": (
        lambda path: set_config(path, quantization_config={"quant_method": "bitsandbytes"}),
        "(quant_method 'bitsandbytes')",
    ),
    "another shape": (lambda path: set_config(path, intermediate_size=128), "has shape [256, 128]"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "no usable tokenizer"),
    "no config": (lambda path: (path / "config.json").unlink(), "no config.json"),
}


@pytest.mark.parametrize(("spoil", "says"), SPOILT.values(), ids=SPOILT)
def test_a_model_that_cannot_be_loaded_is_refused(
    spoil: Edit, says: str, model: Path, tmp_path: Path, run: Run
) -> None:
    spoil(model)
    code, out, err = run("validate", serve_text(tmp_path, {"model": {"name": str(model)}}))
    assert (code, out) == (1, "")
    assert says in err
    assert str(model) in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("spoil", [None, shard], ids=["one file", "sharded"])
def test_a_whole_model_is_valid(spoil: Edit | None, model: Path, tmp_path: Path, run: Run) -> None:
    if spoil:
        spoil(model)
    code, out, _ = run("validate", serve_text(tmp_path, {"model": {"name": str(model)}}))
    assert code == 0
    assert "pages: " in out


def test_a_file_that_is_cut_short_or_missing_is_no_model_to_download(
    tmp_path: Path, run: Run
) -> None:
    gguf = tmp_path / "cut.gguf"
    gguf.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01\x00\x00\x00\x00\x00\x00\x00" * 2)
    for name, says in (
        (gguf, f"{gguf}: the header is cut short"),
        (tmp_path / "none.gguf", "there is no such file"),
        (tmp_path / "none", "there is no such directory"),
    ):
        code, _, err = run("validate", serve_text(tmp_path, {"model": {"name": str(name)}}))
        assert code == 1
        assert says in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            {
                "pool": {"kv_cache_memory_bytes": 25165824},
                "decode": {"autoscaling": {"max_replicas": 64}},
            },
            "pool.extent_pages=",
        ),
        (
            {
                "pool": {
                    "kv_cache_memory_bytes": 8 << 20,
                    "prefix_bytes": 7 << 20,
                    "extent_pages": 1,
                }
            },
            "pool.prefix_bytes=",
        ),
    ],
)
def test_pages_that_serve_would_refuse_are_refused(
    args: dict[str, object], says: str, tiny: Path, tmp_path: Path, run: Run
) -> None:
    args = {"model": {"name": str(tiny)}, **args}
    code, _, err = run("validate", serve_text(tmp_path, args))
    assert code == 2
    assert says in err


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"http_options": {"port": 70000}}, "http_options.port=70000"),
        ({"proxy_location": "Moon"}, "proxy_location"),
        ({"grpc_options": {"port": "none"}}, "grpc_options.port"),
    ],
)
def test_keys_of_ray_serve_are_checked(
    other: dict[str, object], says: str, tiny: Path, tmp_path: Path, run: Run
) -> None:
    text = serve_text(tmp_path, {"model": {"name": str(tiny)}}, **other)
    code, _, err = run("validate", text)
    assert code == 2
    assert says in err


def test_a_context_that_the_pool_does_not_hold_is_a_warning(
    tiny: Path, tmp_path: Path, run: Run
) -> None:
    pool = {"kv_cache_memory_bytes": 1 << 20, "prefix_bytes": 0, "extent_pages": 1}
    code, out, _ = run(
        "validate", serve_text(tmp_path, {"model": {"name": str(tiny)}, "pool": pool})
    )
    assert code == 0
    assert "warning: " not in out
    pool["kv_cache_memory_bytes"] = 300_000
    code, out, _ = run(
        "validate", serve_text(tmp_path, {"model": {"name": str(tiny)}, "pool": pool})
    )
    assert code == 0
    assert "warning: pool.kv_cache_memory_bytes=300000 holds requests of up to " in out
    assert "less than the context of 512: raise it to " in out
