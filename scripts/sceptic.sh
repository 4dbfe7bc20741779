#!/usr/bin/env bash
# What somebody who believes no benchmark would try first, on a real vLLM server (two CPU cores, about half an hour):
# formats told apart by quality, an A/A test, recorded traffic against what arrived, drafts on real text against random
# tokens, a load no client can deliver, a p99 from too few requests.
#   scripts/sceptic.sh [formats] [aa] [traces] [drafts] [overload] [tail]      all of them without a name
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup_cpu.sh
.venv/bin/python scripts/prepare_smollm2.py

run() { # study, overrides...
  local study=$1
  shift
  .venv/bin/sweep run study="sceptic_$study" model=smollm2_135m hardware=cpu engine=vllm_cpu budget=unlimited \
    sampler=grid objectives=speed_cost quality=none proof=shared_cores repeats=none validation=none "$@"
}

shown() { # study, then what grep keeps of each point
  .venv/bin/python - "$@" <<'PYTHON'
import subprocess, sys
import sweep

study = sweep.open(f"runs/sceptic_{sys.argv[1]}")
for point in study.operating_points:
    print(f"\n== {point.point_id}")
    lines = subprocess.run([".venv/bin/sweep", "show", str(study.path), "--point", point.point_id],
                           capture_output=True, text=True, check=True).stdout.splitlines()
    print("\n".join(lines[:3] + [line for line in lines[3:] if any(word in line for word in sys.argv[2:])]))
PYTHON
}

check_formats() {
  echo "Formats of weights and KV cache: which of them cost quality, by how much, and is that more than noise?"
  .venv/bin/python scripts/quantize_checkpoint.py "${SWEEP_SMOLLM2:-${XDG_CACHE_HOME:-$HOME/.cache}/sweep/models/smollm2-135m-instruct}"
  run formats search_space=cpu_formats workload=cpu_demo workload.num_requests=24 'workload.loads.concurrency=[4]' \
    quality=tasks quality.prompt_tokens=128 objectives.metrics=[cost_usd_per_mtok,ttft_p50_ms,quality_kl] \
    +quality.non_inferiority.quality_kl=0.05 +quality.non_inferiority.quality_task_accuracy=0.05
  .venv/bin/sweep quality runs/sceptic_formats
}

check_aa() {
  echo "A/A test: one configuration under two names, each measured three times in turn. They must come out as tied."
  run aa search_space=aa_test workload=cpu_demo 'workload.loads.concurrency=[4]' repeats=front repeats.share=0.7 \
    repeats.settled=1.0
}

check_traces() {
  echo "Recorded traffic: what arrived against what was recorded, cache hits against what the recording shares."
  run azure search_space=none workload=azure_conv workload.num_requests=60 workload.warmup_requests=6 \
    workload.prompt_tokens.high=900 workload.output_tokens.high=24 'workload.loads.rate_scale=[0.25]'
  shown azure ttft_p50 client load cache
  run mooncake search_space=none workload=mooncake workload.num_requests=40 workload.warmup_requests=10 \
    model.args.max_model_len=2048 workload.prompt_tokens.high=1800 workload.output_tokens.high=16 'workload.loads.rate_scale=[1]'
  shown mooncake ttft_p50 client load engine cache
}

check_drafts() {
  echo "Drafts from the prompt (n-gram): accepted on real text, and on the same tokens in random order."
  for text in corpus random; do
    run drafts_$text search_space=none workload=cpu_demo workload.text=$text workload.num_requests=60 \
      workload.prompt_tokens.high=160 workload.output_tokens.high=64 workload.output_tokens.median=48 \
      'workload.loads.concurrency=[2]' objectives.metrics=[tpot_p50_ms,output_throughput_tok_s] \
      '+engine.args.speculative_config={method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4}'
    shown drafts_$text spec_acceptance tpot_p50
  done
}

check_overload() {
  echo "A rate that one client process cannot send: the point is quarantined and the client blamed, not the server."
  run overload search_space=none workload=cpu_demo workload.client_processes=1 workload.num_requests=1500 \
    workload.prompt_tokens.high=24 workload.output_tokens.high=4 workload.output_tokens.median=4 \
    workload.loads.concurrency=[] 'workload.loads.request_rate_rps=[20000]'
  shown overload quarantined client late arrival
}

check_tail() {
  echo "A p99 of 40 requests: refused, and said before the first launch."
  run tail search_space=none workload=cpu_demo workload.num_requests=40 'workload.loads.concurrency=[4]'
  shown tail ttft_p50 ttft_p90 ttft_p99
}

for check in "${@:-formats aa traces drafts overload tail}"; do
  for name in $check; do "check_$name"; done
done
