"""``triptych plan``: compute how many tokens and requests a pool holds."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from triptych.cli.output import JsonFlag, console, make_table, show
from triptych.cli.serving.serve_file import read_serve_file
from triptych.core.config import AppConfig, ModelConfig, parse_bytes
from triptych.core.errors import ConfigError
from triptych.core.pages.page_plan import NEAR_SHARE

if TYPE_CHECKING:
    from triptych.core.methods.learned_files import LearnedFile
    from triptych.core.profile import Profile
    from triptych.workers.models.traits import ModelShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Model = Annotated[
    str | None,
    typer.Option(help="Known model name, directory (config.json is enough) or Hugging Face name."),
]
ConfigFile = Annotated[
    Path | None, typer.Option(help="Ray Serve config file; default: the default settings.")
]
Memory = Annotated[
    str | None,
    typer.Option(
        help="Memory of the page pool, such as 4GiB; default: pool.kv_cache_memory_bytes."
    ),
]
Gpus = Annotated[
    int,
    typer.Option(
        min=0, help="Number of GPUs; each holds weights and copies of the pages of one shard."
    ),
]
GpuMemory = Annotated[str, typer.Option(help="Memory of each GPU, such as 80GiB.")]
Prompt = Annotated[int, typer.Option(min=1, help="Prompt length in tokens.")]
Answer = Annotated[int, typer.Option(min=1, help="Output length in tokens.")]


def plan(
    model: Model = None,
    config: ConfigFile = None,
    memory: Memory = None,
    gpus: Gpus = 0,
    gpu_memory: GpuMemory = "80GiB",
    prompt_tokens: Prompt = 1024,
    answer_tokens: Answer = 256,
    as_json: JsonFlag = False,
) -> None:
    """Show how many pages, tokens and requests fit into memory, by policy and format.

    With --gpus there is one shard (router.shards) per GPU. Its pool has as many pages as fit into
    the GPU beside the weights; host memory holds the pools of all shards.
    """
    from triptych.cli.checks.sizing import Load, app_plan, fits, sizes

    settings = _settings(config, model)
    known = _known(settings)
    shape, profile, is_plain = known.shape, known.profile, known.is_plain
    weights_bytes = _weights_bytes(settings, shape, "cuda" if gpus else "cpu", is_plain=is_plain)
    if gpus:
        settings = _with_capacity(
            settings, _bytes_beside_weights(byte_count(gpu_memory), weights_bytes)
        )
    elif memory is not None:
        settings = _with_capacity(settings, byte_count(memory))
    load = Load(prompt_tokens, answer_tokens)
    context = settings.context_tokens(shape.context_tokens)
    found = fits(
        settings,
        shape.geometry,
        context,
        load,
        profile,
        is_plain=is_plain,
        learned=known.learned,
    )
    pages = app_plan(settings, shape.geometry, context, profile, learned=known.learned)
    needs = sizes(pages, weights_bytes)
    data = {
        "model": settings.model.name,
        "geometry": asdict(shape.geometry),
        "context_tokens": context,
        "parameters": shape.parameters,
        "weights_bytes": weights_bytes,
        "pools": gpus or settings.router.shards,
        "load": asdict(load),
        "per_pool": asdict(needs),
        "fits": [asdict(fit) for fit in found],
    }
    columns = ("policy", "formats", "pages", "tokens a page", "bytes a token", "of FP16",
               "tokens", "expected", "MiB read", "MiB decoded", "requests")  # fmt: skip
    rows = [
        (
            fit.policy, fit.formats, fit.pages, fit.tokens_per_page, fit.token_bytes, fit.of_fp16,
            fit.tokens, fit.expected_tokens, fit.peak_bytes / 2**20, fit.decoding_bytes / 2**20,
            fit.requests,
        )
        for fit in found
    ]  # fmt: skip
    title = (
        f"{settings.model.name}: {data['pools']} x {_mib(needs.capacity_bytes)} of pages, requests "
        f"of {prompt_tokens} + {answer_tokens} tokens; the first line is what is configured"
    )
    show(data, make_table(columns, rows, title), as_json=as_json)
    if not as_json:
        console.print(
            f"of each pool {_mib(needs.prefix_bytes)} keep prefixes and {_mib(needs.stock_bytes)} "
            f"are workers' stock; /dev/shm needs {_mib(needs.shared_memory_bytes)} with "
            f"checkpoints and Ray's store; weights take {_mib(weights_bytes)} "
            f"in each process that computes\n"
            f"memory for all of it, with {needs.workers} workers: {_mib(needs.memory_bytes)}\n"
            "tokens, requests: at least so many (all tokens significant); expected: at the ratio "
            "that calibration measured; MiB of a request at most while it is read and decoded"
        )


def byte_count(text: str) -> int:
    """Parse a size such as ``4GiB``, ``512M`` or ``1e9``.

    Raises: ConfigError if it is none

    >>> byte_count("4GiB"), byte_count("80G"), byte_count("1024")
    (4294967296, 80000000000, 1024)
    """
    nbytes = parse_bytes(text)
    if nbytes is None:
        raise ConfigError(f"{text!r}: expected a size such as 4GiB")
    return nbytes


def _settings(path: Path | None, model: str | None) -> AppConfig:
    settings = read_serve_file(path)[0].config if path is not None else AppConfig()
    return settings if model is None else replace(settings, model=ModelConfig(name=model))


class Known(NamedTuple):
    """Shape, profile and networks of a model.

    With config.json alone there are no profile and no networks, and no plain layers.
    """

    shape: "ModelShape"
    profile: "Profile | None" = None
    is_plain: bool = False
    learned: "tuple[LearnedFile, ...]" = ()


def _known(settings: AppConfig) -> Known:
    from triptych.workers.compress.learned.known_networks import find_networks
    from triptych.workers.models.compression_profile import find_profile
    from triptych.workers.models.facts import describe, shape_of
    from triptych.workers.models.store.model_store import resolve

    path = Path(settings.model.name).expanduser()
    if path.is_dir() and not any(path.glob("*.safetensors")):
        return Known(shape_of(path))
    path = resolve(settings.model.name, allow_download=False)
    facts = describe(path)
    learned = find_networks(settings, facts)
    return Known(shape_of(path), find_profile(settings, facts), facts.is_plain, learned)


def _weights_bytes(settings: AppConfig, shape: "ModelShape", device: str, *, is_plain: bool) -> int:
    """Bytes of the weights in a process that computes."""
    from triptych.workers.models.load import packing_of
    from triptych.workers.models.store.model_store import resolve
    from triptych.workers.models.weights.int4_grid import INT4_BYTES
    from triptych.workers.models.weights.linear import INT8_BYTES

    path = resolve(settings.model.name, allow_download=False) if is_plain else Path()
    item_bytes = DTYPE_BYTES[settings.model.dtype]
    packing = packing_of(path, settings.model.quantization, device, is_plain=is_plain)
    layers = {"dense": item_bytes, "int8": INT8_BYTES}.get(packing, INT4_BYTES)
    return shape.weights_bytes(item_bytes, layers)


def _bytes_beside_weights(gpu_bytes: int, weights_bytes: int) -> int:
    left = gpu_bytes - weights_bytes
    if left <= 0:
        raise ConfigError(
            f"--gpu-memory={gpu_bytes}: less than the weights, {weights_bytes} bytes: take a "
            "larger GPU or a smaller model"
        )
    return int(NEAR_SHARE * left)


def _with_capacity(settings: AppConfig, capacity_bytes: int) -> AppConfig:
    return replace(settings, pool=replace(settings.pool, kv_cache_memory_bytes=capacity_bytes))


def _mib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
