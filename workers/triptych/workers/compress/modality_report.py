"""Tokens and bytes of each modality of a compressed prompt."""

from triptych.core.images import IMAGE, TEXT
from triptych.core.layout import PageLayout
from triptych.core.messages import ModalityReport
from triptych.core.pages import PagePlan
from triptych.workers.compress.job import Job


def modality_reports(job: Job, plan: PagePlan) -> tuple[ModalityReport, ...]:
    """Text and images of a prompt after compression.

    Tokens in shared pages of a cached prefix are not counted as stored.
    """
    is_image, rows = job.is_image, plan.geometry.head_rows
    tokens = int(is_image.sum())
    images, others, image_bytes = 0, 0, 0.0
    for group in job.groups:
        for part in group.classes:
            kept = part.places.cpu().numpy() >= 0
            merged = sum(one.made for one in part.merged if one.modality == IMAGE)
            here = int(kept[:, is_image[part.tokens.cpu().numpy()]].sum()) + merged * len(group.raw)
            images, others = images + here, others + int(part.counts.sum()) - here
            image_bytes += here * _token_bytes(part.layout)
        if not group.classes:  # 16 bits: raw pages are the final ones
            images += len(group.raw) * tokens
            others += len(group.raw) * (job.tokens - tokens)
            image_bytes += len(group.raw) * tokens * _token_bytes(plan.raw)
    stored = job.total_pages * plan.page_bytes
    image = ModalityReport(
        modality=IMAGE,
        tokens=tokens,
        stored_tokens=round(images / rows, 2),
        raw_bytes=plan.raw_bytes(tokens),
        stored_bytes=round(image_bytes),
    )
    text = ModalityReport(
        modality=TEXT,
        tokens=job.tokens - tokens,
        stored_tokens=round(others / rows, 2),
        raw_bytes=plan.raw_bytes(job.tokens - tokens),
        stored_bytes=stored - image.stored_bytes,
    )
    return text, image


def _token_bytes(layout: PageLayout) -> float:
    """Bytes of a page for each token that fits into it."""
    return layout.size_bytes / layout.tokens
