"""The whole training on a tiny model: captures, networks, files, and what is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny import save_tiny_model
from triptych.core.errors import ConfigError, ModelError
from triptych.evals.methods.replaced_cache import ReplacedCache
from triptych.evals.training.captures import (
    CapturePlan,
    Captures,
    capture_samples,
    read_capture,
)
from triptych.evals.training.fit import FitPlan
from triptych.evals.training.learned_networks import (
    MergerPlan,
    ScorerPlan,
    Trained,
    train_merger,
    train_scorer,
)
from triptych.evals.training.merger_training import MergerReport
from triptych.evals.training.output_matching import attend, context_of, output_error
from triptych.evals.training.samples import text_samples
from triptych.evals.training.scorer_training import (
    ScorerObjective,
    ScorerReport,
    poisson_deviance,
    standardize_scorer,
)
from triptych.workers.compress.learned.artefact import read_merger, read_record, read_scorer
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.compress.learned.token_scorer import TokenScorer
from triptych.workers.models.facts import ModelFacts, describe

TEXTS = CapturePlan(context=128, continuation=16, documents=3, held_out=2)
STEPS = FitPlan(steps=12, evaluate_every=4, learning_rate=1e-2)


class Killed(Exception):
    pass


def begin(kill: tuple[str, int] | None = None) -> Callable[[str, int], Callable[..., None]]:
    """Progress that kills the training in a part, after a step."""

    def begin_part(name: str, _steps: int) -> Callable[..., None]:
        def advance(step: int, _loss: float | None) -> None:
            if (name, step) == kill:
                raise Killed

        return advance

    return begin_part


def capture_texts(model: Path, facts: ModelFacts, plan: CapturePlan, folder: Path) -> Captures:
    samples = text_samples(
        model,
        context=plan.context,
        continuation=plan.continuation,
        count=plan.documents + plan.held_out,
    )
    return capture_samples(model, facts, plan, samples, folder, lambda: None)


@pytest.fixture(scope="module")
def facts(tiny_model: Path) -> ModelFacts:
    return describe(tiny_model)


@pytest.fixture(scope="module")
def captures(
    tiny_model: Path, facts: ModelFacts, tmp_path_factory: pytest.TempPathFactory
) -> Captures:
    folder = tmp_path_factory.mktemp("captures")
    return capture_texts(tiny_model, facts, TEXTS, folder)


def scorer_plan(model: Path) -> ScorerPlan:
    return ScorerPlan(
        model=str(model), captures=replace(TEXTS, continuation=0), fit=STEPS, hidden=8
    )


def merger_plan(model: Path) -> MergerPlan:
    return MergerPlan(model=str(model), captures=TEXTS, fit=STEPS, hidden=8, chunk_tokens=4)


@pytest.fixture(scope="module")
def scorer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trained]:
    folder = tmp_path_factory.mktemp("scorer")
    path = folder / "scorer.safetensors"
    return path, train_scorer(scorer_plan(tiny_model), path, folder / "work", begin())


# ------------------------------------------------------------------ captures


def test_captured_outputs_are_those_of_attention_over_the_captured_keys(captures: Captures) -> None:
    capture = read_capture(captures.files[0])
    cache = context_of(capture)
    full = ReplacedCache(cache.keys, cache.values, torch.zeros(cache.keys.shape[:3]))
    outputs, lse = attend(full, capture)
    torch.testing.assert_close(outputs, capture.outputs.float(), rtol=0.02, atol=0.01)
    torch.testing.assert_close(lse, capture.lse, rtol=0.01, atol=0.01)
    error, _ = output_error(full, capture)
    assert float(error.max()) < 1e-4


def test_significance_of_a_shorter_prompt_is_that_of_its_own_queries(captures: Captures) -> None:
    """Attention weights sum up to the number of queries, and a longer prompt has more of them."""
    capture = read_capture(captures.files[0])
    assert sorted(capture.significance) == [16, 32, 64, 128]
    for tokens, significance in capture.significance.items():
        sums = significance * torch.arange(tokens, 0, -1)
        assert (sums.sum(-1) >= tokens - 0.01).all()  # the largest head of each group
        assert significance.shape[2] == tokens
    assert not torch.equal(capture.significance[64][..., :16], capture.significance[16])


def test_later_attention_is_that_of_the_queries_behind_a_prompt(captures: Captures) -> None:
    capture = read_capture(captures.files[0])
    later = capture.attention_after(64)
    assert later.shape == (2, 2, 64)
    assert (later >= 0).all()
    assert (later.sum(-1) < 1.5).all()  # each query spends 1, on newer tokens as well
    own = capture.significance[64] * torch.arange(64, 0, -1) / 64
    assert torch.corrcoef(torch.stack((later.flatten(), own.flatten())))[0, 1] < 0.999


def test_keys_before_rope_do_not_depend_on_the_position(
    tiny_model: Path, facts: ModelFacts, captures: Captures
) -> None:
    """In the first layer, the key before RoPE of a token is a function of the token alone."""
    from triptych.evals.data.texts import documents  # noqa: PLC0415
    from triptych.evals.data.vocabulary import Vocabulary  # noqa: PLC0415

    capture = read_capture(captures.files[0])
    found = documents(
        Vocabulary(tiny_model).encode, "calibration", context=128, continuation=16, count=1
    )
    tokens = torch.tensor(found[0].context)
    frame = RopeFrame.of(facts)
    keys = capture.keys[0, :, :128].float()
    local = frame.to_local(keys, torch.arange(128))
    token = int(tokens.mode().values)
    same = local[:, tokens == token]
    assert same.shape[1] > 3
    torch.testing.assert_close(same, same[:, :1].expand_as(same), rtol=0.01, atol=0.01)
    turned = keys[:, tokens == token]
    assert not torch.allclose(turned, turned[:, :1].expand_as(turned), rtol=0.05, atol=0.05)


def test_the_deviance_is_least_for_the_mean_and_the_logarithm_for_the_mean_logarithm() -> None:
    """Of attention as uneven as that of tokens is."""
    counts = torch.tensor([0.02, 0.1, 0.3, 9.0])
    constants = torch.linspace(-4, 3, 701)
    found = torch.stack([poisson_deviance(one.expand(4), counts).mean() for one in constants])
    assert float(constants[found.argmin()].exp()) == pytest.approx(float(counts.mean()), rel=0.02)
    assert float(counts.log().mean().exp()) < 0.2 * float(counts.mean())
    assert (found >= 0).all()
    assert float(poisson_deviance(counts.log(), counts).abs().max()) < 1e-5
    nothing = poisson_deviance(torch.zeros(1), torch.zeros(1))  # log 0 is not computed
    assert float(nothing) == 1.0


def test_the_deviance_trains_a_scorer_on_all_but_the_first_tokens(
    facts: ModelFacts, captures: Captures
) -> None:
    scorer = TokenScorer(facts.geometry, RopeFrame.of(facts), 8)
    standardize_scorer(scorer, captures.files, "later", "deviance")
    objective = ScorerObjective(scorer, captures, error="deviance")
    before = objective.held_out_loss()
    optimizer = torch.optim.Adam(scorer.parameters(), lr=1e-2)
    for step in range(12):
        optimizer.zero_grad()
        loss = objective.loss(step)
        assert loss.shape == (facts.geometry.layers,)
        loss.sum().backward()
        optimizer.step()
    assert objective.held_out_loss() < before


def test_captures_are_made_once(
    tiny_model: Path, facts: ModelFacts, captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(*_: object, **__: object) -> None:
        raise AssertionError("the model is not needed")

    monkeypatch.setattr("triptych.evals.training.captures.load", no_model)
    again = capture_texts(tiny_model, facts, TEXTS, captures.files[0].parent)
    assert again == captures
    other = replace(TEXTS, context=136)
    with pytest.raises(AssertionError):
        capture_texts(tiny_model, facts, other, captures.files[0].parent)


def test_a_context_beyond_the_model_is_refused(
    tiny_model: Path, facts: ModelFacts, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="the model's context is 512"):
        capture_texts(tiny_model, facts, CapturePlan(context=600), tmp_path)


# ------------------------------------------------------------------ training


def test_the_scorer_learns(scorer: tuple[Path, Trained]) -> None:
    _, trained = scorer
    losses = trained.states["scorer"].losses
    assert min(loss for _, loss in losses[1:]) < losses[0][1]
    assert isinstance(trained.report, ScorerReport)
    report = trained.report
    assert report.correlation > 0.1
    assert 0.25 < report.attention_kept <= 1
    assert report.correlation_of_sums > report.correlation  # these twelve steps do not beat sums


@pytest.mark.parametrize("kill", [("captures", 2), ("scorer", 3), ("scorer", 8), ("scorer", 11)])
def test_a_killed_scorer_training_gives_the_same_file(
    kill: tuple[str, int], tiny_model: Path, scorer: tuple[Path, Trained], tmp_path: Path
) -> None:
    path, plan = tmp_path / "scorer.safetensors", scorer_plan(tiny_model)
    with pytest.raises(Killed):
        train_scorer(plan, path, tmp_path / "work", begin(kill))
    assert not path.exists()
    train_scorer(plan, path, tmp_path / "work", begin())
    assert path.read_bytes() == scorer[0].read_bytes()


@pytest.mark.parametrize("variant", ["gated", "paper"])
def test_the_merger_learns_in_all_parts(
    variant: str, tiny_model: Path, tmp_path: Path, facts: ModelFacts
) -> None:
    plan = replace(merger_plan(tiny_model), variant=variant, reconstruction_steps=8, polish_steps=4)
    path = tmp_path / "merger.safetensors"
    trained = train_merger(plan, path, tmp_path / "work", begin())
    assert list(trained.states) == ["reconstruction", "matching", "polish"]
    for name in ("reconstruction", "matching"):
        losses = trained.states[name].losses
        assert min(loss for _, loss in losses[1:]) < losses[0][1], name
    assert isinstance(trained.report, MergerReport)
    merger, record = read_merger(path, facts)
    assert merger.chunk_tokens == record.chunk_tokens == 4
    with pytest.raises(Killed):
        train_merger(plan, tmp_path / "again", tmp_path / "cut", begin(("polish", 2)))
    train_merger(plan, tmp_path / "again", tmp_path / "cut", begin())
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


# ------------------------------------------------------------------ what is refused


def test_a_torn_file_is_refused(
    scorer: tuple[Path, Trained], facts: ModelFacts, tmp_path: Path
) -> None:
    data = scorer[0].read_bytes()
    path = tmp_path / "torn.safetensors"
    for torn in (data[: len(data) // 2], data[:5], b"", data + b"\0"):
        path.write_bytes(torn)
        with pytest.raises(ModelError):
            read_scorer(path, facts)
    flipped = bytearray(data)
    flipped[-100] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(ModelError, match="torn"):
        read_scorer(path, facts)


def test_a_file_of_another_model_is_refused(
    scorer: tuple[Path, Trained], facts: ModelFacts, tmp_path: Path
) -> None:
    path, _ = scorer
    read_scorer(path, facts)
    other = describe(save_tiny_model(tmp_path / "other", layers=3))
    with pytest.raises(ConfigError, match="trained for"):
        read_scorer(path, other)
    for field in ("weights", "config"):
        with pytest.raises(ConfigError, match="trained for"):
            read_scorer(path, replace(facts, **{field: "0" * 16}))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("version", 2, "version 2"),
        ("basis", "hadamard", "coordinates"),
        ("kind", "merger", "merger"),
    ],
)
def test_a_file_of_another_version_basis_or_kind_is_refused(
    field: str,
    value: object,
    expected: str,
    scorer: tuple[Path, Trained],
    facts: ModelFacts,
    tmp_path: Path,
) -> None:
    path = tmp_path / "changed.safetensors"
    shutil.copy(scorer[0], path)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    record = json.loads(header["__metadata__"]["triptych"])
    header["__metadata__"]["triptych"] = json.dumps({**record, field: value})
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(ConfigError, match=expected):
        read_scorer(path, facts)


def test_weights_of_a_model_are_no_networks(tiny_model: Path, facts: ModelFacts) -> None:
    with pytest.raises(ModelError, match="not a file of learned networks"):
        read_record(tiny_model / "model.safetensors")
