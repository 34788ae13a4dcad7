"""lm-eval: likelihoods of answers, and answers to a text, over /v1/completions."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

url, model = sys.argv[1:]
folder = os.environ["MODEL_FOLDER"]  # its tokenizer says where a context ends
TOWNS = {"Japan": "Tokyo", "France": "Paris", "Italy": "Rome", "Germany": "Berlin"}
ROWS = [
    {"land": land, "choices": list(TOWNS.values()), "right": at} for at, land in enumerate(TOWNS)
]
SHARED = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "The capital of {{land}} is",
    "num_fewshot": 0,
}
TASKS = {
    "towns_chosen": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}],
    },
    "towns_said": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[right]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "filter_list": [
            {
                "name": "town",
                "filter": [
                    {"function": "regex", "regex_pattern": f"({'|'.join(TOWNS.values())})"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match"}],
    },
}

with TemporaryDirectory() as directory:
    here = Path(directory)
    (here / "towns.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    files = {"data_files": {"test": str(here / "towns.jsonl")}}
    for name, task in TASKS.items():
        told = {"task": name, **SHARED, **task, "dataset_kwargs": files}
        (here / f"{name}.yaml").write_text(yaml.safe_dump(told))
    where = f"model={model},base_url={url}/v1/completions,tokenizer_backend=huggingface"
    where += f",tokenizer={folder},num_concurrent=2"
    command = [str(Path(sys.executable).with_name("lm_eval")), "--model", "local-completions"]
    command += ["--model_args", where, "--tasks", ",".join(TASKS), "--include_path", directory]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(here / "hf")}
    subprocess.run([*command, "--output_path", directory], check=True, timeout=500, env=env)
    (path,) = here.glob("**/results_*.json")
    results = json.loads(path.read_text())["results"]
    assert results["towns_chosen"]["acc,none"] >= 0.75, results
    assert results["towns_said"]["exact_match,town"] >= 0.5, results
