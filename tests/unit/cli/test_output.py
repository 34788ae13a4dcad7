"""What commands show while they work."""

import pytest

from triptych.cli.output import progress_bars


def test_progress_in_a_file_is_a_line_for_each_task_that_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_bars(9) as bars:
        texts, other = bars.add_task("texts", total=2), bars.add_task("other", total=5)
        for _ in range(2):
            bars.advance(texts)
        assert capsys.readouterr().err.startswith("texts: 2 in 0.")
        bars.update(other, completed=4)
        assert not capsys.readouterr().err
        bars.update(other, completed=5)
    assert capsys.readouterr().err.startswith("other: 5 in 0.")


def test_a_long_name_with_brackets_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    name = "[bold]" + "uniform:k8v4+selection.method=moments+selection.keep_fraction=0.7" * 2
    with progress_bars(9) as bars:
        bars.advance(bars.add_task(name, total=1))
    assert capsys.readouterr().err.startswith(f"{name}: 1 in 0.")
