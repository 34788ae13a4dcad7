"""A batching policy of one's own, in one file: the newest requests start first.

``router.batch_policy: newest_first:policy`` in config.yaml, with this file on PYTHONPATH; or try it
on a cluster that is not there: ``triptych simulate --policy newest_first:policy,fcfs``.
"""

from triptych.router import Budget, ListedQueue, QueueView, Waiting


def policy(queue: QueueView, budget: Budget) -> list[Waiting]:
    """The newest that fit; but overdue requests go before them."""
    waiting = list(queue.in_order())
    late = [one for one in waiting if one.slack_s < 0]
    newest = sorted((one for one in waiting if one.slack_s >= 0), key=lambda one: one.waited_s)
    batch, left = list[Waiting](), budget.free_bytes
    for one in [*late, *newest][: budget.max_requests]:
        if one.bytes > left:
            break
        batch.append(one)
        left -= one.bytes
    return batch


def main() -> list[str]:
    """Decide once, without a router: a decision is a function of what it is shown."""
    waited_s = {"a": 9.0, "b": 3.0, "c": 2.0, "d": 1.0}
    queue = ListedQueue([Waiting(name, 100, s, slack_s=5.0 - s) for name, s in waited_s.items()])
    chosen = policy(queue, Budget(free_bytes=250, max_requests=8))
    print("starts:", *(one.id for one in chosen))
    return [one.id for one in chosen]


if __name__ == "__main__":
    main()
