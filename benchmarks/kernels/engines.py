"""Time whole steps of the three engines on a CPU or GPU, compared with ``transformers``.

    python benchmarks/kernels/engines.py --gpu --batch 1,8,32 --prompt 2048 --json FILE

The model has the shape of Llama and random weights, so nothing is downloaded. Prompts are random
tokens. All prompts of a batch are prefilled before decode is timed. ``--graphs on,off`` times steps
as captured graphs and kernel by kernel; ``--profile`` shows what the device does in some steps.
Exit code 2 if ``--gpu`` is given and there is none.
"""

import argparse
from pathlib import Path

from needs_gpu import require_gpu  # beside this file


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time whole steps of the engines.")
    parser.add_argument("--gpu", action="store_true", help="compute on the GPU")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--graphs", default="on", help="on, off, or both with a comma between")
    parser.add_argument("--profile", action="store_true", help="show some steps; slows them down")
    parser.add_argument("--only-ours", action="store_true", help="without transformers")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0, help="of the engines' samples")
    parser.add_argument("--policies", default="uniform:fp16,uniform:k8v4,uniform:k4v2")
    parser.add_argument("--layers", type=int, default=16, help="16 of 2,048: as Llama-3.2-1B")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the rows here")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    if asked.gpu:
        require_gpu("leave out --gpu to measure the CPU")
    from engine_steps import run  # noqa: PLC0415 - imports torch, which takes seconds

    run(asked)


if __name__ == "__main__":
    main()
