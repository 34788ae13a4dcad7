"""The compression profile of a model: what calibration chose and the fidelity it measured."""

import json
import struct
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Self

from triptych.core.config import ActorConfig, AppConfig, CompressorConfig, check_policy
from triptych.core.errors import ConfigError
from triptych.core.head_budgets import HeadBudgets, check_head_budgets
from triptych.core.layout import Geometry
from triptych.core.methods.learned_files import LearnedFile
from triptych.core.plugins import POLICY_NAMES
from triptych.core.schema import SchemaError, build

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Fidelity of a compressed cache against the full one, on the texts of the calibration."""

    context: int
    """Tokens that were compressed."""
    bytes_ratio: float
    """All stored bytes over the bytes of a 16-bit cache."""
    kl: float
    top1_agreement: float
    perplexity_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Values of ``auto`` in the compressor's settings; the defaults hold without a profile."""

    policy: str = "uniform:k8v4"
    high_format: str = "k8v4"
    low_format: str = "k4v2"
    alpha_high: float = 1.0
    alpha_low: float = 0.0
    recent_window_tokens: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The compression profile of one model."""

    model: str
    """Name of the model, for display."""
    weights: str
    """Hash of the weights that the profile was made for."""
    geometry: Geometry
    settings: Settings
    config: str = ""
    """Hash of the config that it was made for; empty in profiles of earlier releases."""
    key_centre: str = ""
    """Mean key of each head after RoPE, fp16 [layers, kv_heads, head_dim] in base64; empty: none.

    Subtracting the same vector from all keys of a head does not change softmax, and smaller keys
    lose less in quantization.
    """
    spread: str = ""
    """Head budgets (``core.head_budgets``) in base64; empty: all heads read the same share. The
    field keeps the name that it has in profile files."""
    retrieval_heads: tuple[tuple[int, ...], ...] = ()
    """Query heads of each layer that attend from an answer to the place that has it, first those
    that do so most; empty: they are not known."""
    layer_errors: tuple[float, ...] = ()
    """Relative error of the attention of each layer when a few tokens are kept that these heads
    choose; empty with ``retrieval_heads``."""
    bases: str = ""
    """Bases of keys and values of each head (``KVRotation.bases``) in base64; empty: they are not
    known."""
    pair_order: str = ""
    """RoPE pairs of each head, those with the most energy first (``KVRotation.pair_order``), in
    base64; empty: it is not known."""
    head_alphas: str = ""
    """What thresholds are multiplied with in each head row, fp16 [layers, kv_heads] in base64;
    empty: 1 in all of them."""
    measured: tuple[Fidelity, ...] = field(default=())
    measured_methods: dict[str, tuple[Fidelity, ...]] = field(
        default_factory=dict[str, tuple[Fidelity, ...]]
    )
    """The same for other methods, with these settings."""
    measured_networks: dict[str, str] = field(default_factory=dict[str, str])
    """Of methods that use a learned network: the hash of its tensors (``LearnedFile.tensors``)."""
    pareto: dict[str, float] = field(default_factory=dict[str, float])
    """Methods among which an adaptive server chooses (``compressor.adaptive``), with the
    microseconds that each takes to compress a token."""
    texts: str = ""
    """Hash of the texts it was calibrated on."""
    version: int = VERSION

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file that ``write`` made.

        Raises: ConfigError naming the file and what is wrong with it
        """
        try:
            data = json.loads(path.read_text())
            found = build(cls, data)
        except (OSError, ValueError, SchemaError) as error:
            raise ConfigError(f"compressor.profile={str(path)!r}: {error}") from error
        found._check(path)
        return found

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def pack(values: bytes) -> str:
        return b64encode(values).decode()

    @property
    def centre(self) -> bytes:
        """Mean key of each head: little-endian fp16 [layers, kv_heads, head_dim], or empty."""
        return b64decode(self.key_centre, validate=True)

    @property
    def packed_bases(self) -> bytes:
        """Bases of keys and values, as ``KVRotation.bases``, or empty."""
        return b64decode(self.bases, validate=True)

    @property
    def packed_pairs(self) -> bytes:
        """RoPE pairs by energy, as ``KVRotation.pair_order``, or empty."""
        return b64decode(self.pair_order, validate=True)

    def with_head_budgets(self, head_budgets: HeadBudgets) -> "Profile":
        """A copy with other head budgets."""
        return replace(self, spread=self.pack(head_budgets))

    @property
    def head_budget_codes(self) -> HeadBudgets:
        """Head budgets [layers, kv_heads, steps], or empty."""
        return b64decode(self.spread, validate=True)

    @property
    def alpha_scales(self) -> tuple[float, ...]:
        """Scales of the thresholds by head row, or empty."""
        return struct.unpack(f"<{len(self._packed_scales) // 2}e", self._packed_scales)

    @property
    def _packed_scales(self) -> bytes:
        return b64decode(self.head_alphas, validate=True)

    def with_alpha_scales(self, scales: Sequence[float]) -> "Profile":
        """A copy with other scales of thresholds by head row; none: without them."""
        return replace(self, head_alphas=self.pack(struct.pack(f"<{len(scales)}e", *scales)))

    @property
    def measured_on(self) -> str:
        """The model and the texts of the measurements."""
        return f"{self.model}, texts {self.texts[:12]}" if self.texts else self.model

    def fidelity_of(
        self, config: AppConfig, learned: Sequence[LearnedFile] = ()
    ) -> dict[str, tuple[Fidelity, ...]]:
        """The measurements of each method, if the settings are those that were measured.

        ``learned``: the networks that the server uses. A method with another one than it was
        measured with has no measurements.
        """
        given = replace(
            config.compressor,
            actor=ActorConfig(),
            profile="auto",
            methods=(),
            learned=("auto",),
            adaptive=False,
            max_kl=0.0,
        )
        steps = [plugin for plugin in config.decode.steps if plugin.enabled]
        plain = config.decode.selection.method == "none" and not steps
        if not plain or given != CompressorConfig():
            return {}
        used = {file.tensors for file in learned}
        others = {
            name: found
            for name, found in self.measured_methods.items()
            if name not in self.measured_networks or self.measured_networks[name] in used
        }
        return {self.settings.policy: self.measured, **others}

    def check_model(
        self, weights: str, geometry: Geometry, path: Path, model_config: str = ""
    ) -> None:
        """Raise ConfigError if this profile was made for another model, or another config of it."""
        if self.config and model_config and self.config != model_config:
            raise ConfigError(
                f"compressor.profile={str(path)!r}: made for another config.json of {self.model} "
                f"(hash {self.config}, the model served has {model_config}); run 'triptych "
                "calibrate' for it, or set compressor.profile to auto or none"
            )
        pages = replace(geometry, windows=self.geometry.windows)  # older profiles do not name them
        if (self.weights, self.geometry) != (weights, pages):
            raise ConfigError(
                f"compressor.profile={str(path)!r}: made for {self.model} (weights "
                f"{self.weights}, {self.geometry}), but the model served has weights {weights}, "
                f"{geometry}; run "
                "'triptych calibrate' for it, or set compressor.profile to auto or none"
            )

    def _check_built_in(self) -> None:
        """Raise ConfigError unless its policies are built in: a profile must not name code."""
        for name in (self.settings.policy, *self.pareto):
            if name.partition(":")[0] not in POLICY_NAMES.builtin:
                raise ConfigError(f"policy {name!r}: expected one of Triptych's own")
        known = {self.settings.policy, *self.measured_methods}
        if unknown := [name for name in self.pareto if name not in known]:
            raise ConfigError(f"pareto: {unknown[0]!r} has no measurements in measured_methods")

    def _check(self, path: Path) -> None:
        name = f"compressor.profile={str(path)!r}"
        if self.version != VERSION:
            raise ConfigError(
                f"{name}: version {self.version}, this Triptych reads "
                f"version {VERSION}; run 'triptych calibrate' again"
            )
        shape = self.geometry
        wanted = 2 * shape.head_rows * shape.head_dim
        try:
            check_policy(self.settings.policy)
            self._check_built_in()
            found = len(self.centre)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        except ValueError as error:
            raise ConfigError(f"{name}: key_centre: {error}") from error
        try:
            if self.spread:
                check_head_budgets(self.head_budget_codes, shape)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}; run 'triptych spread' again") from error
        layers = [len(self.retrieval_heads), len(self.layer_errors)]
        if layers not in ([0, 0], [shape.layers] * 2) or not all(self.retrieval_heads):
            raise ConfigError(
                f"{name}: retrieval_heads and layer_errors have {layers[0]} and {layers[1]} "
                f"layers, expected {shape.layers} of each; run 'triptych retrieval' again"
            )
        self._check_scales(name)
        self._check_bases(name)
        self._check_pairs(name)
        if found not in (0, wanted):
            raise ConfigError(f"{name}: key_centre has {found} bytes, expected {wanted}")

    def _check_bases(self, name: str) -> None:
        """Raise ConfigError unless there are two matrices for each head row, or none."""
        try:
            found = len(self.packed_bases)
        except ValueError as error:
            raise ConfigError(f"{name}: bases: {error}") from error
        wanted = 2 * self.geometry.head_rows * self.geometry.head_dim**2
        if found not in (0, wanted):
            raise ConfigError(
                f"{name}: bases has {found} bytes, expected {wanted}; run 'triptych calibrate "
                "--bases' again"
            )

    def _check_pairs(self, name: str) -> None:
        """Raise ConfigError unless each head row has each of its RoPE pairs once, or none has."""
        try:
            order = self.packed_pairs
        except ValueError as error:
            raise ConfigError(f"{name}: pair_order: {error}") from error
        rows, pairs = self.geometry.head_rows, self.geometry.head_dim // 2
        every = bytes(range(pairs)) if pairs <= 256 else b""
        found = [bytes(sorted(order[at : at + pairs])) for at in range(0, len(order), pairs)]
        if found not in ([], [every] * rows):
            raise ConfigError(
                f"{name}: pair_order has {len(order)} bytes, expected {rows} orders of {pairs} "
                "pairs; run 'triptych calibrate --pair-order' again"
            )

    def _check_scales(self, name: str) -> None:
        """Raise ConfigError unless there is one scale of 0 or more for each head row."""
        try:
            scales = self.alpha_scales
        except (ValueError, struct.error) as error:
            raise ConfigError(f"{name}: head_alphas: {error}") from error
        rows = self.geometry.head_rows
        if len(scales) not in (0, rows) or not all(0 <= scale < inf for scale in scales):
            raise ConfigError(
                f"{name}: head_alphas has {len(scales)} scales, expected {rows} of 0 or more; run "
                "'triptych calibrate --scales' again"
            )
