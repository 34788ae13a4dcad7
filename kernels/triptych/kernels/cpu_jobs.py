"""Jobs of the ops of a step on the CPU, and programs of them.

What each does is in the reference of its op; a job writes to memory that it is given.
"""

from triptych.kernels.codec.cpu import append_job
from triptych.kernels.codec.store_prompts import store_prompts_job
from triptych.kernels.codegen.jobs import Job, Program
from triptych.kernels.decode.cpu import LogitTransform, attention_job, record_job, score_job
from triptych.kernels.int4.cpu import add_norm_multiply_job, multiply_job
from triptych.kernels.int8.cpu import add_norm_quantize_job, quantize_job
from triptych.kernels.int8.dot_product import dot_job
from triptych.kernels.pointwise.cpu import norm_job, rotate_job
from triptych.kernels.pointwise.cpu_rotation import rotate_back_job, rotate_kv_job
from triptych.kernels.prefill.cpu_bfloat import attend_parts_job
from triptych.kernels.prompt_parts import PartTable, PromptPart

__all__ = [
    "Job",
    "LogitTransform",
    "PartTable",
    "Program",
    "PromptPart",
    "add_norm_multiply_job",
    "add_norm_quantize_job",
    "append_job",
    "attend_parts_job",
    "attention_job",
    "dot_job",
    "multiply_job",
    "norm_job",
    "quantize_job",
    "record_job",
    "rotate_back_job",
    "rotate_job",
    "rotate_kv_job",
    "score_job",
    "store_prompts_job",
]
