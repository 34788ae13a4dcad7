"""The OpenAI-compatible HTTP server: a FastAPI app over any engine, without Ray."""

from triptych.deployments.http.api_server import create_app
from triptych.deployments.http.interfaces import Engine, Health, ModelCard
from triptych.deployments.http.metrics import IngressMetrics
from triptych.deployments.http.serving import OpenAIServing
from triptych.deployments.http.tokenizer import Tokenizer

__all__ = [
    "Engine",
    "Health",
    "IngressMetrics",
    "ModelCard",
    "OpenAIServing",
    "Tokenizer",
    "create_app",
]
