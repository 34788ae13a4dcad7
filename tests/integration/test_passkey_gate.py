"""What is asked for later is found, with the real model."""

from tests.integration.measured import by_progress, run


@by_progress
def test_a_passkey_is_found_when_the_question_comes_later() -> None:
    """Tokens went low before anybody asked."""
    results = run(
        methods=("default",),
        contexts=(256,),
        documents=1,
        steps=2,
        tasks=("passkey",),
        task_context=750,
        task_count=6,
    )
    for row in results.tasks:
        assert row.full_score >= 0.8
        assert row.score >= row.full_score - 0.2
