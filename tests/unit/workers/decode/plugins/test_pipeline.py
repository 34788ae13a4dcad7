"""The order of plug-ins, what does not fit together, and what they make of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.config import AppConfig, DecodeConfig, StepPluginConfig
from triptych.core.errors import ConfigError, PluginError, RequestError
from triptych.core.messages import PluginOverride
from triptych.core.plugin_overrides import OptionRange, OverridablePlugin
from triptych.core.policy import Policy
from triptych.workers.decode.checkpoint import MAX_PLUGIN_MEMORY
from triptych.workers.decode.plugins import Facts, Pipeline, StepPlugin, offers_of
from triptych.workers.decode.plugins.entropy import EntropyStop, entropy
from triptych.workers.decode.plugins.pipeline import Seen, Verdict

HERE = __name__


@dataclass(frozen=True)
class Mean(StepPlugin):
    """Mean entropy of an answer so far."""

    needs: ClassVar = ("entropy", "length")
    provides: ClassVar = ("mean_entropy",)
    memory: ClassVar = 1

    def step(self, facts: Facts) -> Facts:
        total = facts["memory"] + facts["entropy"].double()[:, None]
        return {"mean_entropy": total[:, 0] / facts["length"], "memory": total}


@dataclass(frozen=True)
class CalmStop(StepPlugin):
    """Ends an answer whose mean entropy is low."""

    needs: ClassVar = ("mean_entropy",)
    provides: ClassVar = ("end",)
    below: float = 0.0
    words: int = 3
    is_loud: bool = False

    def step(self, facts: Facts) -> Facts:
        return {"end": facts["mean_entropy"] < self.below}


@dataclass(frozen=True)
class Other(Mean):
    """Provides what ``Mean`` does."""


@dataclass(frozen=True)
class Egg(StepPlugin):
    needs: ClassVar = ("hen",)
    provides: ClassVar = ("egg",)


@dataclass(frozen=True)
class Hen(StepPlugin):
    needs: ClassVar = ("egg",)
    provides: ClassVar = ("hen",)


@dataclass(frozen=True)
class Usurper(StepPlugin):
    provides: ClassVar = ("entropy",)


@dataclass(frozen=True)
class Elephant(StepPlugin):
    memory: ClassVar = MAX_PLUGIN_MEMORY


@dataclass(frozen=True)
class Liar(StepPlugin):
    """Gives something else than it says."""

    needs: ClassVar = ("token",)
    provides: ClassVar = ("end",)
    how: str = "nothing"

    def step(self, facts: Facts) -> Facts:
        end = facts["token"] < 0
        return {"nothing": {}, "shape": {"end": end[:1]}, "more": {"end": end, "x": end}}[self.how]


class Plain(StepPlugin):
    """No dataclass of its own."""


NO_PLUGIN = 3


def entry(name: str, **more: Any) -> dict[str, Any]:
    known = name in {"entropy_stop", "soft_prune", "layer_exit"}
    return {"name": name if known else f"{HERE}:{name}", **more}


def configured(*plugins: Any, **decode: Any) -> DecodeConfig:
    return AppConfig.from_mapping({"decode": {"plugins": list(plugins), **decode}}).decode


def test_who_provides_goes_before_who_needs_and_others_stay_in_order() -> None:
    config = configured(entry("CalmStop"), "entropy_stop", entry("Mean"))
    pipeline = Pipeline.of(config.steps)
    assert [placed.label for placed in pipeline.places] == ["entropy_stop", "Mean", "CalmStop"]
    assert [placed.memory for placed in pipeline.places] == [slice(0, 1), slice(1, 2), slice(2, 2)]
    assert [pipeline.label(number) for number in (-1, 0, 1, 3, 4)] == [
        "",
        "",
        "entropy_stop",
        "CalmStop",
        "",
    ]


@pytest.mark.parametrize(
    ("plugins", "says"),
    [
        (["entropy_stopp"], "did you mean 'entropy_stop'"),
        ([f"{HERE}:Nobody"], "cannot be imported"),
        ([entry("NO_PLUGIN")], "no frozen dataclass that extends StepPlugin"),
        ([entry("Plain")], "no frozen dataclass that extends StepPlugin"),
        (
            ["triptych.workers.decode.plugins:StepPlugin"],
            "no frozen dataclass that extends StepPlugin",
        ),
        ([entry("CalmStop")], "'CalmStop' needs 'mean_entropy', which nothing provides"),
        ([entry("Mean"), entry("Other")], "'Mean' and 'Other' both provide 'mean_entropy'"),
        ([entry("Egg"), entry("Hen")], "'Egg' and 'Hen' wait for each other"),
        ([entry("Usurper")], "'Usurper' provides 'entropy', which the engine itself does"),
        (["entropy_stop", "entropy_stop"], "'entropy_stop' is there twice"),
        ([entry("Mean", label="selection")], "'selection' is there twice, or is the name of"),
        ([entry("Elephant"), "entropy_stop"], "remember 17 numbers of each answer; there is room"),
        (
            [entry("entropy_stop", options={"treshold": 1.0})],
            "did you mean 'decode.plugins.entropy_stop.options.threshold'",
        ),
        ([entry("entropy_stop", options={"threshold": -1.0})], "threshold=-1.0: expected 0"),
        ([entry("entropy_stop", options={"patience_tokens": 0})], "patience_tokens=0: expected 1"),
        ([entry("entropy_stop", options={"patience_tokens": 1.5})], "patience_tokens=1.5"),
        ([entry("entropy_stop", request_bounds={"calm": [0, 1]})], "'calm' is no option with a"),
        (
            [entry("Mean"), entry("CalmStop", request_bounds={"is_loud": [0, 1]})],
            "'is_loud' is no option with a number (those are: below, words)",
        ),
        (
            [entry("entropy_stop", request_bounds={"threshold": [0.5, 1.0]})],
            "expected numbers, from no more than the server's own 0 to no less",
        ),
        (
            [entry("entropy_stop", request_bounds={"patience_tokens": [0, 99]})],
            "request_bounds.patience_tokens: patience_tokens=0: expected 1 or more",
        ),
        (
            [entry("entropy_stop", request_bounds={"patience_tokens": [1.5, 99]})],
            "expected whole numbers",
        ),
        (
            [entry("Mean", enabled=False), entry("CalmStop")],
            "'CalmStop' is enabled and needs 'Mean', which is not",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_with_a_sentence(
    plugins: Sequence[Any], says: str
) -> None:
    config = configured(*plugins)
    for check in (lambda: Pipeline.of(config.steps), lambda: offers_of(config)):
        with pytest.raises(ConfigError) as caught:
            check()
        assert says in str(caught.value)


@pytest.mark.parametrize(
    ("plugin", "says"),
    [
        ({}, "decode.plugins.name"),
        ({"name": "entropy_stop", "lable": "x"}, "did you mean"),
        ({"name": "entropy_stop", "label": "a b"}, "decode.plugins.label"),
        ({"name": "entropy_stop", "options": {"threshold": [1]}}, "threshold"),
        ({"name": "entropy_stop", "request_bounds": {"threshold": [1]}}, "expected 2 values"),
    ],
)
def test_an_entry_that_is_none_is_refused_before_anything_is_loaded(
    plugin: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(plugin)
    assert says in str(caught.value)


def test_what_is_offered_to_requests() -> None:
    config = configured(
        entry("CalmStop", enabled=False, request_bounds={"words": [1, 9]}),
        entry("Mean", label="average"),
        selection={"method": "moments", "request_bounds": {"keep_fraction": [0.1, 1.0]}},
    )
    assert offers_of(config) == (
        OverridablePlugin(
            plugin="selection",
            on=True,
            bounds={"keep_fraction": OptionRange(default=0.3, least=0.1, most=1.0, is_whole=False)},
        ),
        OverridablePlugin(plugin="average", on=True),
        OverridablePlugin(
            plugin="CalmStop",
            on=False,
            bounds={"words": OptionRange(default=3, least=1, most=9, is_whole=True)},
            needs=("average",),
        ),
    )
    assert offers_of(configured()) == ()
    for name, bounds in (("method", [0, 1]), ("keep_fraction", [0.1, 1.5])):
        with pytest.raises(ConfigError, match=name):
            offers_of(configured(selection={"method": "moments", "request_bounds": {name: bounds}}))


def seen(logits: torch.Tensor, length: int = 2) -> Seen:
    rows = logits.shape[0]
    return Seen(logits, tokens=[7] * rows, lengths=[length] * rows, positions=[9] * rows)


def test_a_request_has_what_it_wants() -> None:
    config = configured(
        entry("entropy_stop", label="sure", options={"threshold": 0.5}),
        entry("Mean", enabled=False),
    )
    pipeline = Pipeline.of(config.steps)
    assert pipeline.chosen(()) == (EntropyStop(0.5), None)
    wanted = (
        PluginOverride(plugin="sure", options={"patience_tokens": 3.0}),
        PluginOverride(plugin="Mean"),
        PluginOverride(plugin="selection", on=False),  # not this pipeline's
    )
    assert pipeline.chosen(wanted) == (EntropyStop(0.5, 3), Mean())
    assert isinstance(pipeline.chosen(wanted)[0].patience_tokens, int)
    assert pipeline.chosen((PluginOverride(plugin="sure", on=False),)) == (None, None)
    for switch in (
        PluginOverride(plugin="nobody"),
        PluginOverride(plugin="sure", options={"nothing": 1.0}),
        PluginOverride(plugin="sure", options={"patience_tokens": 0.0}),
    ):
        with pytest.raises(RequestError):
            pipeline.chosen((switch,))


def test_nobody_looks_where_no_request_has_a_plugin() -> None:
    pipeline = Pipeline.of(configured(entry("entropy_stop", enabled=False)).steps)
    chosen = [pipeline.chosen(())] * 2
    logits = torch.zeros(2, 8)
    assert pipeline.look(chosen, seen(logits), np.zeros((2, MAX_PLUGIN_MEMORY))) is None


def test_the_first_in_order_is_who_ended_an_answer() -> None:
    both = configured(
        entry("CalmStop", options={"below": 9.0}),
        entry("entropy_stop", options={"threshold": 9.0, "patience_tokens": 1}),
        entry("Mean"),
    )
    pipeline = Pipeline.of(both.steps)
    chosen = [
        pipeline.chosen(()),
        pipeline.chosen((PluginOverride(plugin="entropy_stop", on=False),)),
        pipeline.chosen(
            (
                PluginOverride(plugin="entropy_stop", on=False),
                PluginOverride(plugin="CalmStop", on=False),
            )
        ),
    ]
    verdict = pipeline.look(chosen, seen(torch.zeros(3, 8)), np.zeros((3, MAX_PLUGIN_MEMORY)))
    assert verdict is not None
    names = [pipeline.label(number) for number in verdict.ended_by]
    assert names == ["entropy_stop", "CalmStop", ""]
    total = float(torch.tensor(8.0).log())
    assert verdict.memory[:, 0].tolist() == [1.0, 0.0, 0.0]
    assert verdict.memory[:, 1].tolist() == pytest.approx([total] * 3)


@pytest.mark.parametrize("how", ["nothing", "shape", "more"])
def test_a_plugin_that_does_not_do_what_it_says_is_named(how: str) -> None:
    pipeline = Pipeline.of(configured(entry("Liar", options={"how": how})).steps)
    with pytest.raises(PluginError, match="plug-in 'Liar'"):
        pipeline.look(
            [pipeline.chosen(())] * 2, seen(torch.zeros(2, 4)), np.zeros((2, MAX_PLUGIN_MEMORY))
        )


@dataclass
class Run:
    """Steps of some answers, in a batch."""

    pipeline: Pipeline
    chosen: list[Any]
    memory: Any = field(init=False)

    def __post_init__(self) -> None:
        self.memory = np.zeros((len(self.chosen), MAX_PLUGIN_MEMORY))

    def step(self, logits: torch.Tensor, length: int) -> list[int]:
        verdict = self.pipeline.look(self.chosen, seen(logits, length), self.memory)
        if not isinstance(verdict, Verdict):
            return [0] * len(self.chosen)
        self.memory = verdict.memory
        return verdict.ended_by


@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([0.0, 1.0, 2.0]), st.integers(1, 3)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**32 - 1),
)
def test_what_shares_the_batch_changes_nothing(
    wishes: list[tuple[bool, float, int]], seed: int
) -> None:
    """And an answer ends with the last of so many tokens in a row that were sure."""
    pipeline = Pipeline.of(configured(entry("CalmStop"), entry("Mean"), "entropy_stop").steps)
    chosen = [
        pipeline.chosen(
            (
                PluginOverride(
                    plugin="entropy_stop",
                    options={"threshold": threshold, "patience_tokens": float(patience)},
                ),
                PluginOverride(plugin="CalmStop", on=is_on),
            )
        )
        for is_on, threshold, patience in wishes
    ]
    luck = torch.Generator().manual_seed(seed)
    together, alone = Run(pipeline, chosen), [Run(pipeline, [one]) for one in chosen]
    streaks = [0] * len(chosen)
    for length in range(2, 8):
        logits = torch.randn(len(chosen), 8, generator=luck) * 3
        ended = together.step(logits, length)
        assert ended == [run.step(logits[[row]], length)[0] for row, run in enumerate(alone)]
        for row, (_, threshold, patience) in enumerate(wishes):
            probabilities = logits[row].double().softmax(0)
            true = float(-(probabilities * probabilities.log()).sum())
            if abs(true - threshold) < 1e-4:  # rounding decides
                return
            streaks[row] = streaks[row] + 1 if true < threshold else 0
            is_ended = pipeline.label(ended[row]) == "entropy_stop"  # CalmStop is never that calm
            assert is_ended == (streaks[row] >= patience)


def test_entropy_is_that_of_the_distribution() -> None:
    luck = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 1000, generator=luck) * torch.tensor([0, 1, 3, 10, 30, 300])[:, None]
    want = torch.distributions.Categorical(logits=logits.double()).entropy().float()
    assert torch.allclose(entropy(logits), want, atol=2e-6)
    odd = torch.full((3, 4), -torch.inf)
    odd[0, 2] = 5.0
    odd[1, :2] = 1.0
    odd[2, 0] = torch.nan
    sure, even, none = entropy(odd).tolist()
    assert (sure, even) == pytest.approx((0.0, np.log(2)), abs=1e-6)
    assert none != none
    assert (
        not EntropyStop(threshold=9.0, patience_tokens=1)
        .step({"entropy": torch.tensor([torch.nan]), "memory": torch.zeros(1, 1)})["end"]
        .any()
    )


def test_an_entry_may_be_a_name() -> None:
    assert configured("entropy_stop").steps == (StepPluginConfig(name="entropy_stop"),)
    assert StepPluginConfig(name="a.b:C").called == "C"


def test_pruning_is_refused_where_nobody_counts_attention() -> None:
    """And is a setting of its requests, which takes no part in the steps."""
    config = configured(entry("soft_prune", options={"threshold": 0.5}), "entropy_stop")
    counting = Policy(name="a", high_format="k8v4", low_format="k4v2", score_every=2)
    for policy in (replace(counting, score_every=0), replace(counting, low_format=None)):
        with pytest.raises(
            ConfigError, match=r"'soft_prune' needs 'scores', which compressor\.policy"
        ):
            offers_of(config, policy)
    pipeline = Pipeline.of(config.steps, counting)
    chosen = pipeline.chosen((PluginOverride(plugin="entropy_stop", on=False),))
    assert pipeline.settings(chosen) == {"alpha_low": 0.5}
    assert (
        pipeline.settings(pipeline.chosen((PluginOverride(plugin="soft_prune", on=False),))) == {}
    )
    assert (
        pipeline.look([chosen], seen(torch.zeros(1, 4)), np.zeros((1, MAX_PLUGIN_MEMORY))) is None
    )
    twice = configured("soft_prune", entry("soft_prune", label="again"))
    with pytest.raises(ConfigError, match="both provide 'alpha_low'"):
        offers_of(twice)


def test_skipping_layers_is_a_setting_and_refused_where_they_cannot_be_skipped() -> None:
    config = configured(entry("layer_exit", options={"threshold": 0.2, "depth": 0.5}))
    with pytest.raises(ConfigError, match=r"'layer_exit' needs 'exits', which this model does not"):
        offers_of(config, can_exit=False)
    assert [offer.plugin for offer in offers_of(config)] == ["layer_exit"]
    pipeline = Pipeline.of(config.steps)
    assert pipeline.settings(pipeline.chosen(())) == {"exit_entropy": 0.2, "exit_depth": 0.5}
    for options in ({"depth": 1.0}, {"depth": 0.0}, {"threshold": -0.1}):
        with pytest.raises(ConfigError, match=r"layer_exit\.options"):
            offers_of(configured(entry("layer_exit", options=options)))
