"""``triptych serve``: serve a model or a config file, downloading the model if needed."""

import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Annotated

import typer

from triptych.cli.checks.diagnosis import WORKER_NICENESS
from triptych.cli.model import fetch_with_progress
from triptych.cli.output import notes
from triptych.cli.serving.child import become, start_child
from triptych.cli.serving.panel import start_panel
from triptych.cli.serving.presets import settings_of
from triptych.cli.serving.serve_file import default_serve_file, read_http, read_serve_file
from triptych.cli.serving.serve_model import ModelOptions, is_config_file, write_serve_file
from triptych.core.config import AppConfig
from triptych.core.config.cache_dirs import set_environment_defaults, set_library_environment
from triptych.core.errors import ConfigError
from triptych.core.methods.kernel_needs import kernel_needs
from triptych.kvpool.pool.arena import shared_memory_dir

RAY_ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "triptych.deployments.proxy_errors:middlewares",
    WORKER_NICENESS: "0",
    "RAY_enable_output_error_log_if_still_retry": "0",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
}
"""Ray reads these when it starts: errors of its proxies have OpenAI's shape and events of streams
take a direct way, and workers get the cores as any other process does. Calls of Serve's controller
have retries without end, and at a stop it ends under them: Ray does not print that they are
retried. Serve's controller looks four times a second instead of ten, and Serve adds up its own
metrics every 5 s instead of 0.1, of which Ray reads each tenth second. Variables that are set stay
as they are."""
DRAIN_MARGIN_S = 10.0
"""How much longer than the grace period the routers may take to drain."""

Model = Annotated[
    str | None,
    typer.Argument(
        help="Known model name, directory, .gguf file or Hugging Face name; or a Ray Serve config "
        "file (.yaml). Default: the default model.",
    ),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 if not given.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Port; 8000 if not given.")]
MaxModelLen = Annotated[
    int | None, typer.Option(min=2, help="Maximum tokens of prompt plus answer.")
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(min=1, help="Maximum requests in a batch of a decode worker.")
]
Ingresses = Annotated[
    int | None, typer.Option(min=1, help="Ingress replicas behind the one port; 1 if not given.")
]
ServedName = Annotated[
    list[str] | None,
    typer.Option(help="Name of the model in the API; repeat the option for several names."),
]
ApiKey = Annotated[
    list[str] | None, typer.Option(help="Key that clients must send; repeat it for several keys.")
]
DType = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="auto: weights that were quantized to 4 bits stay so; int8: weights and their inputs "
        "in 8 bits; int4: any weights in 4 bits; none: in dtype."
    ),
]
KVCacheMemory = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-memory-bytes",
        help="Memory for KV pages, such as 4GiB; a part of the free memory if not given.",
    ),
]
PrefixCaching = Annotated[
    bool | None,
    typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="The prefix cache."),
]
GenerationConfig = Annotated[
    str | None,
    typer.Option(help="auto: sampling defaults of the model; none: those of OpenAI."),
]
ChatTemplate = Annotated[
    Path | None, typer.Option(help="File with a Jinja chat template, instead of the model's.")
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Settings of a method of a paper: tinyserve, or one of its baselines tinyserve:"
        "full_cache, streaming_llm, snapkv, pyramidkv, soft_prune and entropy_stop."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Any setting as KEY=VALUE, such as topology=colocated; may be repeated."
    ),
]


def serve(
    model: Model = None,
    host: Host = None,
    port: Port = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    ingresses: Ingresses = None,
    served_model_name: ServedName = None,
    api_key: ApiKey = None,
    dtype: DType = None,
    quantization: Quantization = None,
    kv_cache_memory_bytes: KVCacheMemory = None,
    enable_prefix_caching: PrefixCaching = None,
    generation_config: GenerationConfig = None,
    chat_template: ChatTemplate = None,
    preset: Preset = None,
    settings: Settings = None,
) -> None:
    """Serve a model, or the applications of a config file, with Ray Serve."""
    options = ModelOptions(
        host=host,
        port=port,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        ingresses=ingresses,
        served_model_name=tuple(served_model_name or ()),
        api_key=tuple(api_key or ()),
        dtype=dtype,
        quantization=quantization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        enable_prefix_caching=enable_prefix_caching,
        generation_config=generation_config,
        chat_template=chat_template,
        settings=(*settings_of(preset), *(settings or ())),
    )
    if model is not None and is_config_file(model):
        if not options.is_empty:
            raise ConfigError(
                f"{model} is a config file, and options go with a model: set them in the file"
            )
        serve_file(Path(model))
    elif model is None and options.is_empty:
        serve_file(default_serve_file())
    else:
        directory = mkdtemp(prefix="triptych-serve-")
        try:
            serve_file(write_serve_file(Path(directory), model, options), directory)
        finally:  # not reached where the server starts: it needs the directory
            rmtree(directory, ignore_errors=True)


def serve_file(path: Path, temporary: str = "") -> None:
    """Check a config file, download its models if needed, and run it until the server ends.

    ``temporary``: a directory that is removed then.
    """
    apps, http = read_serve_file(path), read_http(path)
    compiling = start_compiling([app.config for app in apps])
    for app in apps:
        fetch_with_progress(app.config.model.name)
        for title, text in start_panel(app, http):  # no line breaks: the curl command is copied
            notes.print(f"{title:>10}  {text}", markup=False, soft_wrap=True)
    notes.print(f"==> serve run {path}", soft_wrap=True)
    # Ray answers SIGTERM by killing all it runs, and a killed pool leaves its pages in shared
    # memory; an interrupt ends the application first.
    set_library_environment()
    set_environment_defaults(RAY_ENVIRONMENT)
    grace_s = max(app.config.ingress.graceful_shutdown_timeout_s for app in apps)
    arenas = {str(app.config.pool.arena_directory or shared_memory_dir()) for app in apps}
    module = [sys.executable, "-m", "triptych.cli.serving.serve_watch"]
    given = [str(path), str(grace_s + DRAIN_MARGIN_S), temporary, str(compiling)]
    become([*module, *given, *sorted(arenas)])


def start_compiling(configs: Sequence[AppConfig]) -> int:
    """Compile kernels of the CPU in a child process while the rest of a server starts.

    These are the ones of the default settings, and of the methods that the server offers.

    Returns: its id; 0 if no stage computes on a CPU
    """
    groups = [group for config in configs for group in config.worker_groups().values()]
    if all(group.actor.num_gpus for group in groups):
        return 0
    needs = {need for config in configs for need in kernel_needs(config)}
    return start_child([sys.executable, "-m", "triptych.kernels.precompile", *sorted(needs)])
