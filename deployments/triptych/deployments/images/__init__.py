"""Images of requests: read from data URIs, and decoded in limited child processes."""

from triptych.deployments.images.decoder import ImageDecoder, ImageSource, process_decoder

__all__ = ["ImageDecoder", "ImageSource", "process_decoder"]
