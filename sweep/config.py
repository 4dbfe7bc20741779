"""The shape of a sweep: plain dataclasses with types and defaults, one per group of conf/.

Nothing here imports Hydra. sweep/compose.py turns YAML files and command-line overrides into these, so that a
misspelt key or a wrong type fails before anything is launched.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class ModelConfig:
    """The model to serve. Facts left None are read from config.json when path is a local folder.

    obtain: how to get the checkpoint, shown when path does not exist.
    """

    name: str = "???"
    path: str = "???"
    obtain: str = "name the folder of a Hugging Face checkpoint, or a hub id such as Qwen/Qwen3-32B"
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    num_hidden_layers: int | None = None
    num_experts: int | None = None
    is_moe: bool = False
    weights_gib: float | None = None


@dataclass
class HardwareConfig:
    """One node. device: "gpu" or "cpu". On a CPU a device is one slot that runs one deployment at a time."""

    name: str = "???"
    device: str = "gpu"
    devices: int = 1
    memory_gib: float | None = None
    price_usd_per_device_hour: float = 0.0
    price_note: str = ""


@dataclass
class LengthConfig:
    """Token lengths: kind fixed (value), uniform (low, high), lognormal (median, sigma), empirical (values), quantiles
    (values, equally spaced) or trace (those of workload.trace). low and high cut every kind.
    """

    kind: str = "fixed"
    value: int | None = None
    median: float | None = None
    sigma: float | None = None
    low: int | None = None
    high: int | None = None
    values: list[int] | None = None


@dataclass
class LoadsConfig:
    """The load ladder of every launch: closed-loop concurrencies, open-loop request rates, speeds of a trace's replay.

    cv: coefficient of variation of the gaps between arrivals (1: Poisson); burstiness = 1/cv^2 says the same.
    ramp_from_rps: each rate is reached in a straight line from this one. rate_scale: 1 replays the trace as recorded.
    """

    concurrency: list[int] = field(default_factory=list)
    request_rate_rps: list[float] = field(default_factory=list)
    burstiness: float = 1.0
    cv: float | None = None
    ramp_from_rps: float | None = None
    rate_scale: list[float] = field(default_factory=list)


@dataclass
class ClassConfig:
    """Requests with an SLO of their own; None takes the workload's value. share: relative to the other classes'."""

    share: float = 1.0
    prompt_tokens: LengthConfig | None = None
    output_tokens: LengthConfig | None = None
    shared_prefix_tokens: int | None = None
    num_shared_prefixes: int | None = None
    temperature: float | None = None
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_e2e_ms: float | None = None


@dataclass
class ConversationConfig:
    """Multi-turn requests: turns of each conversation, if more than one. See measure.workload.Conversation."""

    turns: LengthConfig = field(default_factory=lambda: LengthConfig(value=1))
    max_tokens: int | None = None
    at_once: int | None = None


@dataclass
class TraceConfig:
    """Requests somebody once sent: a shipped trace by name, or a file. See measure.replay.TraceReplay.

    sampling: window (as recorded) or bootstrap (rows at random). sha256 is filled in, so that a study notices a change.
    """

    file: str | None = None
    sampling: str = "window"
    keep_share: float = 1.0
    length_scale: float = 1.0
    max_rows: int = 200_000
    sha256: str | None = None


@dataclass
class WorkloadConfig:
    """What the clients ask. Frozen for a study: every configuration sees the same requests.

    cache: cold, warmed or steady, the state in which every load finds the prefix cache (measure/cache_state.py). text:
    "corpus" (slices of real text) or "random" (its tokens in random order, to see what real text changes).
    client_processes: of the load client; None is one, or more where one cannot deliver a load (measure/fleet.py).
    """

    name: str = "???"
    prompt_tokens: LengthConfig = field(default_factory=LengthConfig)
    output_tokens: LengthConfig = field(default_factory=LengthConfig)
    shared_prefix_tokens: int = 0
    num_shared_prefixes: int = 1
    temperature: float = 0.0
    num_requests: int = 200
    warmup_requests: int = 8
    max_load_s: float = 300.0
    request_timeout_s: float = 300.0
    seed: int = 0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_e2e_ms: float | None = None
    ignore_eos: bool = True
    cache: str = "warmed"
    text: str = "corpus"
    client_processes: int | None = None
    loads: LoadsConfig = field(default_factory=LoadsConfig)
    classes: dict[str, ClassConfig] = field(default_factory=dict)
    conversation: ConversationConfig = field(default_factory=ConversationConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)


@dataclass
class ParamConfig:
    """One dimension of a search space; exactly one of choices, bundles, low/high. See search_spaces/README.md."""

    choices: list[Any] | None = None
    joint: list[str] | None = None
    bundles: dict[str, Any] | None = None
    low: int | float | None = None
    high: int | float | None = None
    step: int | float | None = None
    log: bool = False
    when: str | None = None


@dataclass
class SpaceConfig:
    """What may vary. constraints are expressions over knobs, model.*, hardware.* that every configuration meets.

    params: name -> the fields of a ParamConfig. (OmegaConf cannot add a dict to a dict of dataclasses, and a knob must
    be addable on the command line; space/params.py checks the fields.)
    """

    name: str = "???"
    params: dict[str, Any] = field(default_factory=dict)
    constraints: list[str] = field(default_factory=list)


@dataclass
class ObjectivesConfig:
    """metrics: names from results.metrics.METRICS; their directions are known there."""

    metrics: list[str] = field(default_factory=lambda: ["cost_usd_per_mtok", "ttft_p99_ms", "quality_kl"])
    reference_point: dict[str, float] = field(default_factory=dict)


@dataclass
class ConstraintsConfig:
    """bounds such as "ttft_p99_ms<=2000" that reach the sampler; a point outside stays measured and visible."""

    bounds: list[str] = field(default_factory=list)


@dataclass
class SimulationConfig:
    """The GPUs of engine.kind=simulated and of engine.kind=estimate, which are not there.

    times: "auto" (measured kernels where they cover the config, else a roofline) or "roofline". time_scale: seconds of
    wall clock for each simulated second; what is recorded is wall clock. startup_s: of vLLM itself, before it loads
    weights. tpot_cv, ttft_cv: spread between launches. crash_share: of the regions (layout x numerics) that crash.
    acceptance: accepted share of draft tokens. interference: share by which steps slow down beside another launch
    (estimate only). times and time_scale: simulated only; an estimate knows measured kernels and virtual time alone.
    """

    times: str = "auto"
    time_scale: float = 1.0
    startup_s: float = 20.0
    tpot_cv: float = 0.06
    ttft_cv: float = 0.10
    crash_share: float = 0.0
    acceptance: float = 0.5
    interference: float = 0.0
    seed: int = 0


@dataclass
class EngineSettings:
    """How a deployment is launched. kind: "vllm", or "simulated" and "estimate", which have a simulation.

    python: the interpreter that holds vLLM (None: the one running sweep).
    """

    kind: str = "vllm"
    python: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    startup_timeout_s: float = 900.0
    stop_timeout_s: float = 30.0
    simulation: SimulationConfig | None = None


@dataclass
class ExecutorConfig:
    """kind: local. max_parallel: launches at once (None: as many as the devices hold). retries: of transient causes.

    interference: whether launches may distort each other (study/interference.py): auto measures it once and runs them
    one at a time if they do, ignore never asks, exclusive runs one at a time whatever they do.
    """

    kind: str = "local"
    max_parallel: int | None = None
    retries: int = 1
    interference: str = "auto"


@dataclass
class StorageConfig:
    """dir: where study folders live. optuna: None for a journal file in the study folder, or a database URL."""

    dir: str = "runs"
    optuna: str | None = None


@dataclass
class SamplerConfig:
    """kind: sweep (our own), tpe, random, nsga2, gp, qmc or grid. startup_trials: random, before a model is trusted."""

    kind: str = "sweep"
    seed: int = 0
    startup_trials: int = 16


@dataclass
class BudgetConfig:
    """The sweep ends at the first of these; None is no bound. usd counts every device of the node while it runs."""

    trials: int | None = None
    hours: float | None = None
    usd: float | None = None


@dataclass
class QualityConfig:
    """Agreement with the reference engine, once per numerics fingerprint.

    num_prompts x prompt_tokens of text are scored, top_logprobs per position, `concurrency` requests at a time.
    tasks: of lm-eval, asked of every fingerprint; task_dir: your own task files (None: the example that ships), where
    lm-eval runs; task_limit: items of each; task_metric: what says an item is right (None: acc, exact_match, …);
    python: the interpreter that holds lm-eval (None: the one running sweep).
    non_inferiority: quality metric -> margin, the largest loss that is accepted, in the metric's unit: a configuration
    whose 95 % interval does not exclude a larger loss is infeasible, and not picked.
    under_load: answers of the baseline are compared with its own under the busiest closed loop; under_load_max_kl: the
    tolerance, nats per token. verify_speculation: greedy completions of speculative configurations are checked against
    the target model; one that is not lossless, or not checked, gets numerics of its own.
    """

    enabled: bool = True
    num_prompts: int = 16
    prompt_tokens: int = 256
    top_logprobs: int = 20
    concurrency: int = 8
    seed: int = 0
    tasks: list[str] = field(default_factory=list)
    task_dir: str | None = None
    task_limit: int | None = None
    task_metric: str | None = None
    task_timeout_s: float = 3600.0
    python: str | None = None
    non_inferiority: dict[str, float] = field(default_factory=dict)
    under_load: bool = False
    under_load_max_kl: float = 0.005
    verify_speculation: bool = True


@dataclass
class ProofConfig:
    """Limits beyond which a point is quarantined: measured, visible, never on the front. See launch/proof.py.

    max_loop_lag_ms, max_loop_lag_share: the client is too slow to trust when the p99 of its event-loop delay exceeds
    both the milliseconds and that share of the median TTFT. max_send_lateness_ms: the same for how late its requests
    left. max_undelivered_share: of the load asked for. max_client_cpu_share: of a core, of the busiest client process.
    max_drift: of a median latency from the first half of a stationary load to its second, beyond chance.
    max_unexpected_hit_rate: prefix-cache hits above what the workload itself shares. max_foreign_tokens_share: output
    tokens the engine counted and nobody of ours received. exclusive_devices: no process of others on our devices.
    max_throttled_share: of the time a device's clocks were held down by heat or by its power supply (a power cap is
    its normal life). max_drain_s: how long earlier requests may take to leave the engine before a load begins.
    cross_check: also run vLLM's own bench once, at the baseline's busiest closed loop.
    """

    max_loop_lag_ms: float = 5.0
    max_loop_lag_share: float = 0.05
    max_send_lateness_ms: float = 10.0
    max_undelivered_share: float = 0.05
    max_client_cpu_share: float = 0.9
    max_drift: float = 0.25
    max_unexpected_hit_rate: float = 0.05
    max_foreign_tokens_share: float = 0.02
    exclusive_devices: bool = True
    max_throttled_share: float = 0.1
    max_drain_s: float = 60.0
    cross_check: bool = False


@dataclass
class CostConfig:
    """How the deployment will be used and charged for, which no measurement knows. Formulas: measure/cost.py.

    utilization: share of the measured load that is used at the peak. peak_to_mean: peak over mean traffic.
    starts_per_day: of one replica. input_price_ratio, cached_input_price_ratio: prices of prompt tokens as shares of
    an output token's; None prices output tokens alone. margin: on top of what the devices cost.
    """

    utilization: float = 1.0
    peak_to_mean: float = 1.0
    starts_per_day: float = 0.0
    input_price_ratio: float | None = None
    cached_input_price_ratio: float | None = None
    margin: float = 0.0


@dataclass
class ValidationConfig:
    """finalists: configs of the front that are launched fresh at the end and measured on held-out requests."""

    finalists: int = 0


@dataclass
class RepeatsConfig:
    """Further measurements where they matter: points whose membership of the front is open, and a control.

    share: of the launches' seconds that repeats may take at most; 0 for none. max_per_point: measurements of one point.
    settled: probability at which a point counts as on the front, or as off it. control_every: launches between two of
    vLLM's defaults, which tell the launch-to-launch spread and whether the node drifts.
    """

    share: float = 0.0
    max_per_point: int = 3
    settled: float = 0.9
    control_every: int = 10


@dataclass
class LadderConfig:
    """What a launch makes of its load ladder (launch/ladder.py). The defaults: every load of it, and no other.

    extra_levels: that a configuration may be measured at between those of the ladder, where the constraints' highest
    load and the knee lie. cut_confidence: with which every load so far, two at least, must be dominated before the
    lighter ones are left out; None never does.
    """

    extra_levels: int = 0
    cut_confidence: float | None = None


@dataclass
class SweepConfig:
    """Everything a sweep needs to know, resolved.

    warm_start: folders of earlier studies whose fronts are launched first and whose failures are asked last.
    """

    study: str = "???"
    model: ModelConfig = field(default_factory=ModelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    space: SpaceConfig = field(default_factory=SpaceConfig)
    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)
    constraints: ConstraintsConfig = field(default_factory=ConstraintsConfig)
    engine: EngineSettings = field(default_factory=EngineSettings)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    proof: ProofConfig = field(default_factory=ProofConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    repeats: RepeatsConfig = field(default_factory=RepeatsConfig)
    ladder: LadderConfig = field(default_factory=LadderConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    warm_start: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, as written to study.json."""
        return asdict(self)
