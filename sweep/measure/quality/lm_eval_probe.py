"""Run under the interpreter that holds lm-eval: evaluates one running server and writes every item's result.

    python lm_eval_probe.py REQUEST.json ANSWER.json        in the folder with the tasks' files

REQUEST: {"tasks", "include_path", "limit", "model_args"}. ANSWER: {"version", "tasks": {task: [{"item",
metric: value}]}}. Imports lm-eval and the standard library only.
"""

import json
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

request = json.loads(Path(sys.argv[1]).read_text())
model_args = request["model_args"]
with urllib.request.urlopen(model_args["base_url"].replace("/completions", "/models"), timeout=60) as response:
    # lm-eval would cut contexts at 2048 tokens.
    model_args["max_length"] = json.load(response)["data"][0]["max_model_len"]
result = simple_evaluate(
    model="local-completions",
    model_args=model_args,
    tasks=request["tasks"],
    task_manager=TaskManager(include_path=request["include_path"]),
    limit=request["limit"],
    bootstrap_iters=0,
    log_samples=True,
)
tasks = {}
for name, samples in result["samples"].items():
    rows = {}
    for sample in samples:
        # A task with several filters scores an item once for each; the first is the one its authors put first.
        row = {metric: sample[metric] for metric in sample["metrics"] if isinstance(sample[metric], int | float)}
        rows.setdefault(f"{sample['doc_id']}-{sample['doc_hash'][:12]}", {k: float(v) for k, v in row.items()})
    tasks[name] = [{"item": item, **row} for item, row in rows.items()]
Path(sys.argv[2]).write_text(json.dumps({"version": version("lm_eval"), "tasks": tasks}))
