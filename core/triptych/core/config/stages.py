"""The stages, and the actors that they run in."""

from dataclasses import dataclass, field
from typing import Literal

from triptych.core.config.steps import SelectionConfig, StepPluginConfig
from triptych.core.config.values import MIB, Auto, require
from triptych.core.errors import ConfigError
from triptych.core.layout import page_format
from triptych.core.plugins import POLICY_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorConfig:
    """How many copies of a stage run, and what each copy gets."""

    num_replicas: int = 1
    """Copies of the stage, each an actor of its own."""

    num_cpus: float = 0.0
    """CPUs that Ray sets aside per copy; 0 lets the stages of a small machine share its cores."""

    num_gpus: float = 0.0
    """GPUs that Ray sets aside per copy, which then computes on one; 0: it computes on the CPU."""

    resources: dict[str, float] = field(default_factory=dict[str, float])
    """Custom resources of Ray that a copy takes, such as ``fast_disk: 0.01``: they say on which
    nodes it may run."""

    threads: int | Literal["auto"] = "auto"
    """Compute threads per copy; ``auto``: all cores of the machine, of which decode has half while
    other stages work, or one if the copy has a GPU."""

    def __post_init__(self) -> None:
        require(self.num_replicas >= 1, "num_replicas", self.num_replicas, ">= 1")
        require(self.num_cpus >= 0, "num_cpus", self.num_cpus, ">= 0")
        require(self.num_gpus >= 0, "num_gpus", self.num_gpus, ">= 0")
        positive = all(amount > 0 for amount in self.resources.values())
        require(positive, "resources", self.resources, "amounts > 0")
        require(
            self.threads == "auto" or self.threads >= 1, "threads", self.threads, "'auto', >= 1"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingConfig:
    """Whether a stage gets more copies when it has much to do, and fewer when it has not."""

    max_replicas: int = 0
    """The most copies; 0: always ``actor.num_replicas``. It begins with that many."""

    min_replicas: int = 1
    """The fewest."""

    target_utilization: float = 0.7
    """Share of the copies' time, or of their decode slots, that is to be in use."""

    upscale_delay_s: float = 10.0
    """Seconds for which more copies must be wanted before they are started."""

    downscale_delay_s: float = 300.0
    """Seconds for which fewer must do before some are stopped; what they have goes on elsewhere."""

    def __post_init__(self) -> None:
        most, least = self.max_replicas, self.min_replicas
        require(least >= 1, "autoscaling.min_replicas", least, ">= 1")
        fits = most == 0 or most >= least
        require(fits, "autoscaling.max_replicas", most, f"0, or min_replicas ({least}) and more")
        share = self.target_utilization
        require(0 < share <= 1, "autoscaling.target_utilization", share, "above 0, up to 1")
        for name in ("upscale_delay_s", "downscale_delay_s"):
            require(getattr(self, name) >= 0, f"autoscaling.{name}", getattr(self, name), ">= 0")

    @property
    def is_on(self) -> bool:
        return self.max_replicas > 0

    def check(self, actor: ActorConfig, stage: str) -> None:
        """Raise ConfigError if a stage begins with a number that it may not have."""
        count, least, most = actor.num_replicas, self.min_replicas, self.max_replicas
        fits = not self.is_on or least <= count <= most
        expected = f"from {stage}.autoscaling.min_replicas ({least}) to max_replicas ({most})"
        require(fits, f"{stage}.actor.num_replicas", count, expected)

    def most(self, actor: ActorConfig) -> int:
        """Copies that there may ever be at once."""
        return max(actor.num_replicas, self.max_replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeConfig:
    """The stage that computes features of images, for models that read images."""

    worker: Literal["own", "prefill"] = "own"
    """Which workers run it: its own, or those of prefill, each of which then loads what computes
    features too. Then ``prefill.actor`` and ``prefill.autoscaling`` say how many there are."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    """Copies and their resources."""

    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    """When there are more of them, or fewer."""

    max_batch_pixels: int = 4_194_304
    """Maximum pixels of the images of one step, as clients sent them; a larger image takes a step
    of its own."""

    cache_bytes: int = 64 * MIB
    """Page memory of each copy for features of images that may come again, part of
    ``pool.kv_cache_memory_bytes``; the least recently used are evicted first. 0: no cache."""

    def __post_init__(self) -> None:
        pixels, kept = self.max_batch_pixels, self.cache_bytes
        require(pixels >= 1, "encode.max_batch_pixels", pixels, ">= 1")
        require(kept >= 0, "encode.cache_bytes", kept, ">= 0")
        self.autoscaling.check(self.actor, "encode")
        if self.worker == "prefill":
            for name in ("actor", "autoscaling"):
                given = getattr(self, name)
                expected = f"no value with encode.worker=prefill: set prefill.{name}"
                require(given == type(given)(), f"encode.{name}", given, expected)


PromptQuantization = Literal["auto", "none", "int8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """The stage that reads prompts."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    """Copies and their resources."""

    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    """When there are more of them, or fewer."""

    max_num_batched_tokens: int = 512
    """Maximum prompt tokens of one step (chunked prefill); longer prompts take several steps."""

    quantization: PromptQuantization = "auto"
    """How products of prompts are computed: ``int8``, with weights and inputs in 8 bits (a CPU of
    x86 and plain layers); ``none``, as those of answers are; ``auto``, in 8 bits where that is
    faster (with VNNI and without AMX), ``model.dtype`` is ``bfloat16`` and ``model.quantization``
    is ``auto``."""

    def __post_init__(self) -> None:
        self.autoscaling.check(self.actor, "prefill")
        tokens = self.max_num_batched_tokens
        require(tokens >= 1, "prefill.max_num_batched_tokens", tokens, ">= 1")


MAX_METHODS = 16
"""Most methods beside the default one: metrics have a series for each."""


SEPARATOR = "/"
"""Between a method and the one for the tokens of images, as in ``uniform:k8v4/snapkv``."""


def parts_of_name(name: str) -> tuple[str, str]:
    """Names of the text method and of the image method; the latter is empty if there is none.

    >>> parts_of_name("diffkv/uniform:k4v2"), parts_of_name("diffkv")
    (('diffkv', 'uniform:k4v2'), ('diffkv', ''))
    """
    text, _, images = name.partition(SEPARATOR)
    return text, images


def check_policy(name: str) -> None:
    """Raise ConfigError unless ``name`` is a policy, and its format one that pages have."""
    text, images = parts_of_name(name)
    if images:
        check_policy(text)
        check_policy(images)
        return
    kind, _, form = name.partition(":")
    if kind == "uniform":
        page_format(form)
        return
    try:
        POLICY_NAMES.check(name)
    except ConfigError as error:
        methods = ", ".join(repr(name) for name in POLICY_NAMES.builtin if name != "uniform")
        expected = f"'auto', 'uniform:<format>', {methods} or a plug-in"
        text = f"compressor.policy={name!r}: expected {expected}; {error}"
        raise ConfigError(text) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorConfig:
    """The stage that turns raw pages into compressed ones."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    """Copies and their resources."""

    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    """When there are more of them, or fewer."""

    profile: str = "auto"
    """Compression profile, the result of calibration: a file that ``triptych calibrate`` wrote,
    ``none``, or ``auto``: the one that comes with Triptych for this model, if any. It sets every
    ``auto`` below."""

    policy: str = "auto"
    """How each token is stored: ``uniform:<format>`` stores all in one format; ``diffkv`` stores
    significant ones in ``high_format`` and drops others or stores them in ``low_format``;
    ``leankv`` decides by their share of all attention; ``saw_int4``, ``fp8``, ``kivi``, ``kivi:2``,
    ``kvarn``, ``oscar`` and ``block_gtq`` store all tokens in formats of their own;
    ``streaming_llm``, ``knorm``, ``keydiff``, ``h2o``, ``snapkv``, ``pyramidkv``, ``adakv``,
    ``tova``, ``expected_attention``, ``cake``, ``kvcrush``, ``tangram`` and ``compresskv`` keep
    ``keep_share`` of a prompt's tokens, in ``high_format``, ``epicache`` does so while it reads the
    prompt block by block, and ``h2o:generate`` keeps as many while it generates; ``spherical``
    chooses high, low or dropped tokens of formats of its own, in ``keep_share`` of the bytes;
    ``kvmerger`` merges tokens with alike keys until as many are left; ``learned:merge``,
    ``learned:paper`` and ``learned:score`` use networks trained for the model (``learned``);
    ``module:object`` is a policy of your own (docs/extending.md).
    ``<method>/<method>``, as in ``uniform:k8v4/snapkv``: the second one decides about the tokens of
    images in a prompt. ``auto`` without a profile: ``uniform:k8v4``."""

    methods: tuple[str, ...] = ()
    """Methods that a request or a key may choose beside ``policy``, which is the default: names as
    in ``policy``, at most 16. They use the settings below, and decode in one batch."""

    learned: tuple[str, ...] = ("auto",)
    """Files of learned networks, which ``triptych train`` writes for a model, at most one of each
    kind and modality: a compressor for ``learned:merge``, one of variant ``paper`` for
    ``learned:paper``, a scorer for ``learned:score``. ``auto``: those that come with Triptych for
    this model, where no file is named. A file of another model, or a torn one, is refused at
    start."""

    high_format: str = "auto"
    """Format of significant tokens (``diffkv``, ``leankv``) and of merged ones
    (``learned:merge``, ``kvmerger``); ``auto`` without a profile: ``k8v4``. With ``fp16`` sink and
    recent window have 16 bits too, and requests use no cached prefixes."""

    low_format: str = "auto"
    """Format of the less significant ones (``diffkv``, ``leankv``); ``auto`` without a profile:
    ``k4v2``."""

    alpha_high: float | Auto = "auto"
    """A token of n is high if its mean attention from later ones reaches ``alpha_high / n``;
    ``auto`` without a profile: 1."""

    alpha_low: float | Auto = "auto"
    """Below ``alpha_low / n`` it is dropped; 0, which is ``auto`` without a profile, drops none."""

    head_alphas: Literal["auto", "even"] = "auto"
    """Whether ``alpha_high`` and ``alpha_low`` are scaled for each layer and KV head: ``auto``: by
    the profile, if it has scales (``triptych calibrate --scales``); ``even``: the same for all."""

    mass_high: float = 0.05
    """The least significant tokens that together receive less than this share of all attention are
    not high (``leankv``)."""

    mass_low: float = 0.0
    """Those that together receive less than this share are dropped (``leankv``)."""

    keep_share: float = 0.5
    """Share of a prompt's tokens that retention rules keep (``snapkv``, ``h2o``, ...), or
    ``kvmerger`` leaves, with the first and the newest ones; of their bytes with ``spherical``.
    Requests of these methods use no cached prefixes."""

    block_tokens: int = 512
    """``epicache``: tokens of a prompt that are read before tokens are dropped down to the budget
    again."""

    keep_tokens: int = 0
    """``epicache``: most tokens of a prompt that are kept, whatever ``keep_share`` is, so that the
    memory of a prompt of any length is bounded; 0: no limit."""

    image_keep_share: float | Auto = "auto"
    """The same for the tokens of images, where a retention rule decides about them
    (``uniform:k8v4/snapkv``); ``auto``: ``keep_share``."""

    recent_window_tokens: int | Auto = "auto"
    """Newest tokens that stay in 8 bits (K8V8); ``auto`` without a profile: 64."""

    high_window_tokens: int = 64
    """``diffkv``, ``leankv``: newest tokens that are always at least high, because too few later
    tokens have attended to them."""

    sink_tokens: int = 1
    """First tokens, kept in 8 bits (K8V8) and rounded up to whole small pages (attention sinks)."""

    score_every_tokens: int = 8
    """``diffkv``, ``leankv`` and ``h2o:generate``: output tokens between two measurements of the
    attention that each token receives; 0 (not ``h2o:generate``): no measurement, every token that
    leaves the window is high."""

    floor: Literal["low", "high"] = "low"
    """Lowest class that may store tokens of requests: ``low`` (as the policy decides; while memory
    is short, high tokens of running requests become low before any request is preempted) or
    ``high`` (all tokens are high at least, and none is dropped). A key of ``ingress.api_keys`` and
    a request may ask for a higher one; the highest counts."""

    adaptive: bool = False
    """Whether the router chooses the method of requests that name none: of the methods of the
    profile (``triptych calibrate --pareto``) that are offered, the one with the smallest KL whose
    pages fit the free memory and that delays no answer by more than a few percent. ``methods``
    without a value offers all of them."""

    max_kl: float = 0.0
    """Largest KL to the full cache, as calibration measured it, that the method of a request may
    have, in nats; 0: any. A key of ``ingress.api_keys`` and a request may ask for less; the
    smallest counts. A request whose method has more is refused, and one that would have more with
    low tokens keeps its high ones when memory is short."""

    kv_rotation: Literal["auto", "none", "hadamard"] = "auto"
    """Rotation of keys and values before they are quantized: a Hadamard rotation distributes
    outliers over all channels; ``auto``: ``hadamard`` if a format is quantized."""

    def __post_init__(self) -> None:
        self.autoscaling.check(self.actor, "compressor")
        require(bool(self.profile), "compressor.profile", self.profile, "'auto', 'none' or a file")
        if self.policy != "auto":
            check_policy(self.policy)
        count = len(self.methods)
        require(count <= MAX_METHODS, "compressor.methods", count, f"at most {MAX_METHODS} names")
        for name in self.methods:
            check_policy(name)
        require(all(self.learned), "compressor.learned", self.learned, "names of files, or 'auto'")
        for name in (self.high_format, self.low_format):
            if name != "auto":
                page_format(name)
        low, high = self.mass_low, self.mass_high
        require(0 <= high <= 1, "compressor.mass_high", high, "0 to 1")
        require(0 <= low <= high, "compressor.mass_low", low, f"0 to mass_high ({high})")
        keep = self.keep_share
        require(0 < keep <= 1, "compressor.keep_share", keep, "above 0, up to 1")
        block, most = self.block_tokens, self.keep_tokens
        require(block > 0, "compressor.block_tokens", block, "above 0")
        require(most >= 0, "compressor.keep_tokens", most, "0 (no limit) or more")
        share = self.image_keep_share
        expected = "above 0, up to 1"
        require(share == "auto" or 0 < share <= 1, "compressor.image_keep_share", share, expected)
        window = self.recent_window_tokens
        require(window == "auto" or window >= 0, "compressor.recent_window_tokens", window, ">= 0")
        require(self.sink_tokens >= 0, "compressor.sink_tokens", self.sink_tokens, ">= 0")
        young = self.high_window_tokens
        require(young >= 0, "compressor.high_window_tokens", young, ">= 0")
        may_drop = self.floor == "low"
        expected = "0 with compressor.floor=high, which drops no token"
        keeps = self.alpha_low in ("auto", 0)
        require(may_drop or keeps, "compressor.alpha_low", self.alpha_low, expected)
        require(may_drop or not low, "compressor.mass_low", low, expected)
        require(self.max_kl >= 0, "compressor.max_kl", self.max_kl, ">= 0")
        every = self.score_every_tokens
        require(every >= 0, "compressor.score_every_tokens", every, ">= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """The stage that writes answers."""

    actor: ActorConfig = field(default_factory=ActorConfig)
    """Copies and their resources."""

    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)
    """When there are more of them, or fewer."""

    max_num_seqs: int = 32
    """Maximum requests in the running batch of one decode worker."""

    plugins: tuple[StepPluginConfig | str, ...] = ()
    """What looks at each step (docs/extending.md): names, or entries with a name and more."""

    selection: SelectionConfig = field(default_factory=SelectionConfig)
    """Which pages a step reads."""

    def __post_init__(self) -> None:
        self.autoscaling.check(self.actor, "decode")
        count = self.max_num_seqs
        require(count >= 1, "decode.max_num_seqs", count, ">= 1")

    @property
    def steps(self) -> tuple[StepPluginConfig, ...]:
        """The plug-ins, each as an entry."""
        return tuple(
            StepPluginConfig(name=one) if isinstance(one, str) else one for one in self.plugins
        )
