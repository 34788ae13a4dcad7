"""Read the ``/metrics`` of a server."""

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 5.0

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Samples by name, then by labels."""

    samples: Mapping[str, Mapping[Labels, float]]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 if there is none."""
        wanted = labels.items()
        found = self.samples.get(name, {})
        return sum(value for key, value in found.items() if wanted <= dict(key).items())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """A metric's samples, summed by the value of one label."""
        sums = dict[str, float]()
        for key, value in self.samples.get(name, {}).items():
            at = dict(key).get(label, "")
            sums[at] = sums.get(at, 0.0) + value
        return sums

    def __contains__(self, name: str) -> bool:
        return name in self.samples


def read_metrics(url: str) -> Metrics:
    """Get the metrics of a server.

    Raises: httpx.HTTPError if it does not answer, or with an error
    """
    answer = httpx.get(f"{url.rstrip('/')}/metrics", timeout=TIMEOUT_S).raise_for_status()
    return parse_metrics(answer.text)


def parse_metrics(text: str) -> Metrics:
    """Parse Prometheus' text format."""
    samples = dict[str, dict[Labels, float]]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return Metrics(samples)
