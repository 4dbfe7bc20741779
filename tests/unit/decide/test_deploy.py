"""Every artefact of every format: complete, correctly quoted, without a secret, and what was measured."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sweep import cli
from sweep.decide.deploy import FORMATS, artefact
from sweep.decide.deployment import Deployment
from sweep.decide.opened import Study, open_study
from sweep.engine.engine_args import EngineConfig
from sweep.errors import ConfigError, StudyError
from sweep.results.records import LaunchRecord, PointRecord

SECRET = "hf_thisMustNeverBeWritten"
# Everything that one of the readers (sh, YAML, compose, Kubernetes, systemd, vLLM's file loader) takes for its own.
AWKWARD_ARGS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "chat_template": "{% for m in messages %}'$HOME' $(PORT) %h \\n \"q\"\n\tnext; #no{% endfor %}",
    "served_model_name": ["a b", "1e-05", "y", "null"],
    "revision": "1e3",
    "tokenizer_mode": "0o17",
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.9,
    "speculative_config.method": "ngram",
    "speculative_config.num_speculative_tokens": 4,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2], "pass_config": {"fuse": True}},
    "max_num_seqs": None,
}
AWKWARD_ENV = {"VLLM_A": 'a $b "c" %d \\e', "VLLM_ON": "yes", "VLLM_N": "1e5"}


def make_study(
    *, device: str = "gpu", model: str = "org/model", args: dict[str, Any] | None = None,
    env: dict[str, str] | None = None, devices: int = 1, name: str = "night", load: dict[str, Any] | None = None,
    version: str | None = "0.32.0+cu129", metrics: dict[str, float] | None = None,
) -> Study:  # fmt: skip
    """A study of one point, measured twice."""
    engine = {"model": model, "args": args or {}, "env": env or {}}
    load = load or {"concurrency": 16, "request_rate_rps": None, "burstiness": 1.0}
    shared = {
        "launch_id": "l", "config_hash": EngineConfig.from_dict(engine).hash, "fingerprint": "f", "engine": engine,
        "params": {}, "purpose": "trial", "devices": devices,
    }  # fmt: skip
    values = metrics or {"ttft_p99_ms": 410.0, "request_throughput_rps": 8.0, "e2e_mean_ms": 2600.0, "startup_s": 300.0}
    points = [
        PointRecord(
            point_id=f"l-c16-r{i}", load=load, load_label="c16", state="measured", metrics=values, repeat=i,
            finished_at=f"2026-05-0{4 + i}T10:00:00+00:00", **shared,
        )
        for i in range(2)
    ]  # fmt: skip
    launch = LaunchRecord(
        device_ids=tuple(range(devices)), state="ok", cause=None, detail=None, transient=False, startup_s=300.0,
        duration_s=400.0, started_at="", finished_at="", vllm_version=version, **shared,
    )  # fmt: skip
    meta = {
        "study": name,
        "objectives": ["ttft_p99_ms"],
        "host": {"cpu_count": 8, "system": "Linux-6.1-x86_64-with-glibc2.36"},
        "config": {"hardware": {"name": "h100" if device == "gpu" else "cpu", "device": device, "devices": 8}},
    }
    return Study(Path(name), meta, (*points, launch))


def write(study: Study, format: str, replicas: int = 1, **options: Any) -> str:
    return artefact(study.operating_points[0], study, format, replicas, **options)


def awkward(**changes: Any) -> Study:
    return make_study(**({"args": AWKWARD_ARGS, "env": AWKWARD_ENV, "devices": 2} | changes))


def measured_argv(study: Study) -> list[str]:
    engine = EngineConfig.from_dict(study.operating_points[0].engine)
    return [engine.model, *engine.argv()]


def header(text: str) -> list[str]:
    lines = text.splitlines()
    start = 1 if lines[0].startswith("#!") else 0
    return lines[: next(i for i, line in enumerate(lines) if i >= start and not line.startswith("#"))]


# ---------------------------------------------------------------- all formats


@pytest.mark.parametrize("format", FORMATS)
def test_it_names_study_point_metrics_and_date(format):
    study = make_study()
    text = "\n".join(header(write(study, format)))
    assert "study     night" in text
    assert study.operating_points[0].point_id in text
    assert "measured  2026-05-05, 2 times, vLLM 0.32.0, h100" in text, "the day of the newest repeat"
    assert re.search(r"ttft_p99_ms +410 ± 0 ms", text)
    assert "16 concurrent requests on 1 GPU" in text


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_point_gives_the_same_text(format):
    assert write(awkward(), format) == write(awkward(), format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model", ["org/model", "/models/llama"])
def test_no_secret_of_the_environment_is_written(format, model, monkeypatch):
    for name in ("HF_TOKEN", "VLLM_API_KEY", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    text = write(make_study(model=model), format)
    assert SECRET not in text
    assert "VLLM_API_KEY" in text
    assert ("HF_TOKEN" in text) == (model == "org/model"), "a local checkpoint needs no hub"


@pytest.mark.parametrize("format", FORMATS)
def test_a_secret_among_the_arguments_is_refused(format):
    study = make_study()
    object.__setattr__(study.records[0], "engine", {"model": "m", "args": {}, "env": {"HF_TOKEN": SECRET}})
    object.__setattr__(study.records[1], "engine", {"model": "m", "args": {}, "env": {"HF_TOKEN": SECRET}})
    with pytest.raises(ConfigError, match=r"env\.HF_TOKEN looks like a secret") as error:
        write(study, format)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("format", FORMATS)
def test_a_line_break_in_a_name_stays_inside_the_comment(format):
    study = make_study(name="evil\nExecStart: rm \\")
    text = write(study, format)
    assert "# ExecStart: rm" in text
    assert not any(line.endswith("\\") for line in header(text))
    assert "\nExecStart: rm" not in text.replace("# ExecStart: rm", "")


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [("helm", {}, "unknown deployment format 'helm'"), ("k8s", {"replicas": 0}, "replicas=0"),
     ("k8s", {"port": 80}, "port=80"), ("serve", {"port": 70000}, "port=70000")],
)  # fmt: skip
def test_mistakes(format, options, message):
    with pytest.raises(ConfigError, match=message):
        write(make_study(), format, **options)


def test_a_point_that_failed_cannot_be_deployed(study_dir):
    study = open_study(study_dir)
    broken = next(p for p in study.operating_points if p.state == "failed")
    with pytest.raises(StudyError, match="nothing to deploy"):
        artefact(broken, study, "serve")


def test_a_simulated_point_says_so(study_dir):
    study = make_study()
    for record in study.records[:2]:
        object.__setattr__(record, "provenance", "simulated")
    assert "\n# simulated 2026-05-05" in write(study, "k8s")


# ---------------------------------------------------------------- serve


def test_serve_is_the_command_of_the_engine():
    study = awkward()
    command = EngineConfig.from_dict(study.operating_points[0].engine).serve_command()
    text = write(study, "serve")
    assert text.startswith("#!/bin/sh\n#")
    assert text.endswith(f"\n{command}\n")
    assert write(study, "serve", port=9000).endswith(f"\n{command} --port 9000\n")


def test_serve_means_to_a_shell_what_was_measured(tmp_path):
    script = tmp_path / "serve.sh"
    script.write_text(write(awkward(), "serve"))
    vllm = tmp_path / "vllm"
    vllm.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    vllm.chmod(vllm.stat().st_mode | stat.S_IXUSR)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv, seen = json.loads(subprocess.run(["sh", str(script)], env=env, capture_output=True, check=True).stdout)
    assert argv == ["serve", *measured_argv(awkward())]
    assert AWKWARD_ENV.items() <= seen.items()


# ---------------------------------------------------------------- YAML in general


def plain_scalars(node: yaml.Node) -> list[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        return [node] if node.style is None else []
    children = [n for pair in node.value for n in pair] if isinstance(node, yaml.MappingNode) else node.value
    return [scalar for child in children for scalar in plain_scalars(child)]


# What the YAML 1.2 core schema, or Go's reader of Kubernetes and compose files, does not read as text.
NO_TEXT_ELSEWHERE = re.compile(
    r"[-+]?(\.\d+|\d[\d_]*(\.\d*)?)([eE][-+]?\d+)?|0[xob][\da-fA-F]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    r"|y|Y|n|N|yes|no|on|off|true|false|null|~|\d{4}-\d\d?-\d\d?"
)


@pytest.mark.parametrize("format", ["yaml", "compose", "k8s"])
def test_text_is_text_to_every_reader_of_yaml(format):
    for document in yaml.compose_all(write(awkward(), format)):
        texts = [s.value for s in plain_scalars(document) if s.tag == "tag:yaml.org,2002:str"]
        assert texts
        assert [t for t in texts if NO_TEXT_ELSEWHERE.fullmatch(t)] == []


def test_the_file_for_vllm_holds_flags_as_its_loader_wants_them():
    values = yaml.safe_load(write(awkward(), "yaml", port=8123))
    assert values["model"] == "org/model"
    assert values["port"] == 8123
    assert values["no-enable-prefix-caching"] is True, "vLLM drops `enable-prefix-caching: false`"
    assert values["speculative-config"] == {"method": "ngram", "num_speculative_tokens": 4}
    assert "max-num-seqs" not in values
    assert not any("_" in key for key in values)
    assert not any(value is False or value is None for value in values.values())


def test_the_file_for_vllm_says_how_to_set_the_environment():
    run = next(line for line in header(write(awkward(), "yaml")) if "--config" in line)
    words = shlex.split(run.removeprefix("# run"))
    assert dict(word.split("=", 1) for word in words[:3]) == AWKWARD_ENV
    assert words[3:6] == ["vllm", "serve", "--config"]


# ---------------------------------------------------------------- compose


def check_compose(project: dict[str, Any]) -> None:
    """The parts of the compose specification that are used: required fields and types."""
    assert set(project) <= {"name", "services", "volumes"}
    assert re.fullmatch(r"[a-z0-9][a-z0-9_-]*", project["name"])
    host_ports = []
    for name, service in project["services"].items():
        assert re.fullmatch(r"[a-zA-Z0-9._-]+", name)
        assert set(service) <= {
            "image", "entrypoint", "command", "environment", "ports", "restart", "healthcheck", "labels", "volumes",
            "shm_size", "deploy", "cap_add", "cpuset",
        }  # fmt: skip
        assert re.fullmatch(r"[\w./-]+:[\w.-]+", service["image"])
        for field in ("entrypoint", "command", "ports", "cap_add"):
            assert all(isinstance(word, str) for word in service.get(field, [])), field
        assert all(v is None or isinstance(v, str) for v in service["environment"].values())
        assert all(isinstance(v, str) for v in service["labels"].values())
        host_ports += [port.split(":")[0] for port in service["ports"]]
        assert service["healthcheck"]["test"][0] == "CMD"
        assert isinstance(service["healthcheck"]["retries"], int)
        for field in ("interval", "timeout", "start_period"):
            assert re.fullmatch(r"\d+s", service["healthcheck"][field])
        for volume in service.get("volumes", []):
            assert volume["type"] in ("bind", "volume")
            assert volume["target"].startswith("/")
            if volume["type"] == "volume":
                assert volume["source"] in project["volumes"]
        for gpu in service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", []):
            assert gpu["capabilities"] == ["gpu"]
            assert ("count" in gpu) != ("device_ids" in gpu), "the specification allows one of them"
            assert all(isinstance(i, str) for i in gpu.get("device_ids", []))
    assert len(set(host_ports)) == len(host_ports)


def interpolated(value: str) -> str:
    """As compose and Kubernetes read it: $$ is $, and nothing else may start a variable."""
    assert "$" not in value.replace("$$", "")
    return value.replace("$$", "$")


def gpus_of(service: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = service["deploy"]["resources"]["reservations"]["devices"][0]
    return found


def test_compose_runs_what_was_measured():
    project = yaml.safe_load(write(awkward(), "compose", port=9000))
    check_compose(project)
    service = project["services"]["vllm"]
    assert service["entrypoint"] == ["vllm", "serve"]
    assert [interpolated(w) for w in service["command"]] == [*measured_argv(awkward()), "--port", "9000"]
    assert service["ports"] == ["9000:9000"]
    environment = service["environment"]
    assert {n: interpolated(environment[n]) for n in AWKWARD_ENV} == AWKWARD_ENV
    assert environment["HF_TOKEN"] is environment["VLLM_API_KEY"] is None, "passed through"
    assert service["image"] == "vllm/vllm-openai:v0.32.0"
    assert gpus_of(service)["count"] == 2
    assert service["shm_size"] == "4gb", "two workers exchange tensors through it"
    assert service["healthcheck"]["start_period"] == "1800s"


def test_compose_gives_every_replica_its_own_gpus_and_port():
    project = yaml.safe_load(write(awkward(), "compose", 3))
    check_compose(project)
    services = project["services"]
    assert [gpus_of(s)["device_ids"] for s in services.values()] == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert [s["ports"] for s in services.values()] == [["8000:8000"], ["8001:8000"], ["8002:8000"]]


def test_compose_on_a_cpu():
    project = yaml.safe_load(write(make_study(device="cpu", model="/models/small"), "compose", 2))
    check_compose(project)
    services = list(project["services"].values())
    assert all("deploy" not in s and "shm_size" not in s for s in services)
    assert services[0]["image"] == "vllm/vllm-openai-cpu:v0.32.0-x86_64"
    assert [s["cpuset"] for s in services] == ["0-0", "1-1"], "eight cores in eight slots"
    assert services[0]["volumes"] == [
        {"type": "bind", "source": "/models/small", "target": "/models/small", "read_only": True,
         "bind": {"create_host_path": False}}
    ]  # fmt: skip
    assert services[0]["environment"]["HF_HUB_OFFLINE"] == "1"
    assert "volumes" not in project


# ---------------------------------------------------------------- Kubernetes

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def check_metadata(metadata: dict[str, Any]) -> None:
    assert DNS_LABEL.fullmatch(metadata["name"])
    assert len(metadata["name"]) <= 63
    for value in metadata.get("labels", {}).values():
        assert re.fullmatch(r"([A-Za-z0-9]([-\w.]*[A-Za-z0-9])?)?", value)
        assert len(value) <= 63
    assert all(isinstance(value, str) for value in metadata.get("annotations", {}).values())


def check_probe(probe: dict[str, Any], ports: set[str]) -> None:
    assert set(probe) <= {"httpGet", "periodSeconds", "timeoutSeconds", "failureThreshold"}
    assert probe["httpGet"]["path"].startswith("/")
    assert probe["httpGet"]["port"] in ports
    assert all(isinstance(v, int) and v > 0 for k, v in probe.items() if k != "httpGet")


def check_kubernetes(documents: list[dict[str, Any]]) -> None:
    """The parts of the Deployment and Service schemas that are used: required fields, types, and what must agree."""
    deployment, service = documents
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    for document in documents:
        check_metadata(document["metadata"])
    spec = deployment["spec"]
    assert set(spec) <= {"replicas", "selector", "template", "progressDeadlineSeconds"}
    assert isinstance(spec["replicas"], int)
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    pod = spec["template"]["spec"]
    assert set(pod) <= {"containers", "volumes", "enableServiceLinks"}
    assert pod["enableServiceLinks"] is False
    (container,) = pod["containers"]
    assert set(container) <= {
        "name", "image", "command", "args", "env", "ports", "resources", "startupProbe", "readinessProbe",
        "livenessProbe", "volumeMounts", "securityContext",
    }  # fmt: skip
    assert all(isinstance(word, str) for word in [*container["command"], *container["args"]])
    ports = {port["name"] for port in container["ports"]}
    assert all(isinstance(port["containerPort"], int) for port in container["ports"])
    names = [entry["name"] for entry in container["env"]]
    assert len(set(names)) == len(names)
    for entry in container["env"]:
        if "value" in entry:
            assert set(entry) == {"name", "value"}
            assert isinstance(entry["value"], str)
        else:
            assert set(entry["valueFrom"]["secretKeyRef"]) == {"name", "key", "optional"}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        check_probe(container[kind], ports)
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    assert {mount["name"] for mount in container.get("volumeMounts", [])} == set(volumes)
    for name, volume in volumes.items():
        assert DNS_LABEL.fullmatch(name)
        assert len(set(volume) - {"name"}) == 1, "a volume has one source"
    for quantities in container["resources"].values():
        assert all(re.fullmatch(r"\d+", str(q)) for q in quantities.values())
    assert service["spec"]["selector"].items() <= labels.items()
    for port in service["spec"]["ports"]:
        assert isinstance(port["port"], int)
        assert port["targetPort"] in ports


def kubernetes_of(study: Study, replicas: int = 1, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(Deployment's spec, its container)"""
    documents = list(yaml.safe_load_all(write(study, "k8s", replicas, **options)))
    check_kubernetes(documents)
    return documents[0]["spec"], documents[0]["spec"]["template"]["spec"]["containers"][0]


def test_kubernetes_runs_what_was_measured():
    spec, container = kubernetes_of(awkward(), 3, port=9000, image="registry/mine:1")
    assert spec["replicas"] == 3
    assert container["image"] == "registry/mine:1"
    assert container["command"] == ["vllm", "serve"]
    assert [interpolated(w) for w in container["args"]] == [*measured_argv(awkward()), "--port", "9000"]
    values = {e["name"]: interpolated(e["value"]) for e in container["env"] if "value" in e}
    assert values == AWKWARD_ENV
    secrets = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in container["env"] if "valueFrom" in e}
    assert set(secrets) == {"HF_TOKEN", "VLLM_API_KEY"}
    assert all(ref["optional"] is True and ref["key"] == name for name, ref in secrets.items())
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    memory = next(v for v in spec["template"]["spec"]["volumes"] if v["name"] == "shared-memory")
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}
    mount = next(m for m in container["volumeMounts"] if m["name"] == "shared-memory")
    assert mount["mountPath"] == "/dev/shm"


def test_kubernetes_waits_for_a_start_as_long_as_measured_and_more():
    local = make_study(model="/models/llama")
    _, container = kubernetes_of(local)
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 900, "three times the 300 s measured"
    quick = make_study(model="/models/llama", metrics={"startup_s": 20.0})
    _, container = kubernetes_of(quick)
    assert container["startupProbe"]["failureThreshold"] == 60, "never less than ten minutes"


def test_kubernetes_on_a_cpu_asks_for_cores_and_no_gpu():
    spec, container = kubernetes_of(make_study(device="cpu", model="/models/small", args={"tensor_parallel_size": 2}))
    assert "gpu" not in json.dumps(spec)
    assert container["resources"] == {"requests": {"cpu": 1}, "limits": {"cpu": 1}}
    volumes = {v["name"]: v for v in spec["template"]["spec"]["volumes"]}
    assert volumes["checkpoint-0"]["hostPath"] == {"path": "/models/small"}
    assert "shared-memory" in volumes, "CPU workers exchange tensors through it too"


def test_every_checkpoint_named_is_mounted():
    args = {"speculative_config": {"method": "draft_model", "model": "/models/draft"}, "tokenizer": "/models/tok"}
    study = make_study(model="/models/big", args=args)
    spec, _ = kubernetes_of(study)
    paths = [v["hostPath"]["path"] for v in spec["template"]["spec"]["volumes"] if "hostPath" in v]
    assert paths == ["/models/big", "/models/draft", "/models/tok"]


def test_a_relative_folder_is_named_in_full_for_a_service_and_as_measured_for_a_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    study = make_study(model="models", args={"speculative_config": {"model": "models"}})
    _, container = kubernetes_of(study)
    assert container["args"][0] == str(tmp_path / "models")
    assert json.loads(container["args"][2])["model"] == str(tmp_path / "models")
    assert write(study, "serve").splitlines()[-1].startswith("vllm serve models ")
    assert study.operating_points[0].engine["args"]["speculative_config"] == {"model": "models"}, "left as it was"


@pytest.mark.parametrize(
    ("load", "target"),
    [({"concurrency": 16}, "16"), ({"concurrency": None, "request_rate_rps": 8.0}, "20")],
)
def test_the_autoscaler_hint_keeps_the_measured_load(load, target):
    # Open loop: 8 requests/s that stay 2.6 s are 20.8 in flight.
    text = write(make_study(load=load), "k8s", 2)
    documents = list(yaml.safe_load_all(text))
    assert len(documents) == 2, "a hint, not applied"
    commented = text[text.index("# ---") :].splitlines()[1:]
    scaler = yaml.safe_load("\n".join(line.removeprefix("# ") for line in commented))
    assert (scaler["apiVersion"], scaler["kind"]) == ("autoscaling/v2", "HorizontalPodAutoscaler")
    check_metadata(scaler["metadata"])
    spec = scaler["spec"]
    assert spec["scaleTargetRef"]["name"] == documents[0]["metadata"]["name"]
    assert spec["minReplicas"] == 2 <= spec["maxReplicas"]
    assert spec["metrics"][0]["pods"]["target"] == {"type": "AverageValue", "averageValue": target}


def test_without_the_time_in_the_system_no_autoscaler_is_made_up():
    load = {"concurrency": None, "request_rate_rps": 8.0}
    text = write(make_study(load=load, metrics={"request_throughput_rps": 8.0}), "k8s")
    assert "HorizontalPodAutoscaler" not in text
    assert "No autoscaler is proposed" in text


@pytest.mark.parametrize(
    ("version", "image", "warned"),
    [("0.32.0", "vllm/vllm-openai:v0.32.0", False), ("0.11.0rc2", "vllm/vllm-openai:v0.11.0rc2", False),
     ("0.32.1.dev7+gabc", "vllm/vllm-openai:latest", True), (None, "vllm/vllm-openai:latest", True)],
)  # fmt: skip
def test_the_image_is_of_the_measured_version_or_says_it_is_not(version, image, warned):
    study = make_study(version=version)
    _, container = kubernetes_of(study)
    assert container["image"] == image
    assert ("name yours with --image" in write(study, "k8s")) == warned
    assert "name yours" not in write(study, "k8s", image="mine:1")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kubectl_reads_the_same_from_it(tmp_path):
    (tmp_path / "vllm.yaml").write_text(write(awkward(), "k8s"))
    (tmp_path / "kustomization.yaml").write_text("resources: [vllm.yaml]\n")
    command = ["kubectl", "kustomize", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    read = {d["kind"]: d for d in yaml.safe_load_all(result.stdout)}
    assert read == {d["kind"]: d for d in yaml.safe_load_all(write(awkward(), "k8s"))}


# ---------------------------------------------------------------- systemd


def unit_of(text: str) -> dict[str, dict[str, list[str]]]:
    """Sections of keys of values."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        else:
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return sections


def systemd_words(value: str, *, variables: bool) -> list[str]:
    """As systemd reads a command line (systemd.service, systemd.syntax): words, C escapes, %% and, in commands, $$."""
    words = [
        re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), quoted or bare)
        for quoted, bare in re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', value)
    ]
    for word in words:
        assert "%" not in word.replace("%%", "")
        assert not variables or "$" not in word.replace("$$", "")
    words = [word.replace("%%", "%") for word in words]
    return [word.replace("$$", "$") for word in words] if variables else words


def test_systemd_runs_what_was_measured():
    unit = unit_of(write(awkward(), "systemd"))
    service = unit["Service"]
    assert systemd_words(service["ExecStart"][0], variables=True) == [
        "/opt/vllm/bin/vllm", "serve", *measured_argv(awkward()), "--port", "8000",
    ]  # fmt: skip
    pairs = [systemd_words(line, variables=False) for line in service["Environment"]]
    environment = dict(pair[0].split("=", 1) for pair in pairs)
    assert AWKWARD_ENV.items() <= environment.items()
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert service["EnvironmentFile"][0].startswith("-/etc/vllm/"), "secrets come from there, where it exists"
    assert unit["Install"]["WantedBy"] == ["multi-user.target"]


def test_systemd_on_a_cpu_names_no_gpu():
    assert "CUDA" not in write(make_study(device="cpu"), "systemd")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("study", [make_study(model="/models/x"), awkward()], ids=["plain", "awkward"])
def test_systemd_itself_finds_no_fault(study, tmp_path):
    vllm = tmp_path / "bin" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text("#!/bin/sh\n")
    vllm.chmod(0o755)
    study.meta["config"]["engine"] = {"python": str(vllm.with_name("python"))}
    unit = tmp_path / "vllm-night.service"
    unit.write_text(write(study, "systemd"))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    own = [line for line in result.stderr.splitlines() if "vllm" in line]
    assert own == []
    unit.write_text(write(study, "systemd").replace("Restart=on-failure", "Restart=perhaps"))
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "perhaps" in result.stderr, "it does look"


# ---------------------------------------------------------------- names and the command line


@pytest.mark.parametrize("name", ["Night_Run.2", "9-lives", "--", "x" * 200, "ünïcode"])
def test_names_suit_everyone(name):
    study = make_study(name=name)
    found = Deployment(study.operating_points[0], study).name
    assert DNS_LABEL.fullmatch(found)
    assert len(found) <= 42


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    status = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_line_knows_every_format(study_dir, capsys):
    point = open_study(study_dir).pick("ttft_p99_ms<=2500").chosen
    for format in FORMATS:
        status, out, _ = run(capsys, "deploy", study_dir, "--point", point.point_id, "--format", format)
        assert status == 0
        assert out == artefact(point, open_study(study_dir), format)


def test_an_sla_chooses_the_point(study_dir, tmp_path, capsys):
    file = tmp_path / "k8s.yaml"
    sla = ["--sla", "ttft_p99_ms<=2500 quality_kl<=0.01"]
    status, out, _ = run(capsys, "deploy", study_dir, *sla, "--format", "k8s", "--replicas", 4, "--port", 9001,
                         "--image", "mine:2", "-o", file)  # fmt: skip
    assert (status, out.strip()) == (0, str(file))
    spec = next(yaml.safe_load_all(file.read_text()))["spec"]
    assert spec["replicas"] == 4
    container = spec["template"]["spec"]["containers"][0]
    assert (container["image"], container["args"][-1]) == ("mine:2", "9001")
    chosen = open_study(study_dir).pick("ttft_p99_ms<=2500 quality_kl<=0.01").chosen
    assert chosen.point_id in file.read_text()


def test_an_sla_that_nothing_meets_deploys_nothing(study_dir, tmp_path, capsys):
    file = tmp_path / "out"
    status, out, err = run(capsys, "deploy", study_dir, "--sla", "ttft_p99_ms<=1", "--format", "serve", "-o", file)
    assert (status, out) == (3, "")
    assert "Infeasible" in err
    assert not file.exists()


def test_a_misspelt_point_is_named_again(study_dir, tmp_path, capsys):
    point = open_study(study_dir).operating_points[0].point_id
    status, _, err = run(capsys, "deploy", study_dir, "--point", point + "x", "--format", "serve")
    assert status == 2
    assert f"did you mean '{point}'" in err
    status, _, err = run(
        capsys, "deploy", study_dir, "--point", point, "--format", "serve", "-o", tmp_path / "no" / "x"
    )
    assert status == 2
    assert "cannot write" in err
