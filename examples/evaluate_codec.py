"""Measure a page format: KL divergence from the full cache, and bytes."""

from triptych.evals.studies.study import Results, Study, measure, prepare, report


def main(model: str = "smollm2-135m-instruct", context: int = 512, documents: int = 2) -> Results:
    study = Study(
        model=model,
        methods=("uniform:k8v4", "uniform:k4v2"),
        contexts=(context,),
        documents=documents,
        steps=16,
        tasks=(),
        greedy_tokens=0,
    )
    prepared = prepare(study)
    results = report(prepared, measure(prepared, lambda *_: None, lambda *_: None))
    for row in results.rows:
        print(f"{row.method} at {row.context}: KL {row.summary.kl:.4f}, ", end="")
        print(f"{row.bytes_all_in_ratio:.1%} of the bytes")
    return results


if __name__ == "__main__":
    main()
