"""A deployment as plain data for docker compose and for Kubernetes. YAML itself is written by deploy.py."""

from __future__ import annotations

import math
from typing import Any

from sweep.decide.deployment import Deployment

HEALTH = "/health"
SECRET_NAME = "vllm-secrets"
IN_FLIGHT_METRIC = "vllm_requests_in_flight"
_HUB_CACHE = "/root/.cache/huggingface"
_PROBE_PERIOD_S = 10


def compose(deployment: Deployment) -> dict[str, Any]:
    """A compose project: one service per replica, since replicas of one service would share GPUs and the host port."""
    replicas = range(deployment.replicas)
    many = deployment.replicas > 1
    project: dict[str, Any] = {
        "name": deployment.name,
        "services": {f"vllm-{i}" if many else "vllm": _service(deployment, i, many=many) for i in replicas},
    }
    if deployment.from_hub:
        project["volumes"] = {"huggingface": {}}
    return project


def _service(d: Deployment, replica: int, *, many: bool) -> dict[str, Any]:
    # Not curl: an image that runs vLLM is sure to have Python.
    ask = f"import urllib.request as r; r.urlopen('http://localhost:{d.port}{HEALTH}', timeout=5)"
    binds = [
        {"type": "bind", "source": p, "target": p, "read_only": True, "bind": {"create_host_path": False}}
        for p in map(_literal, d.mounts)
    ]
    cache = [{"type": "volume", "source": "huggingface", "target": _HUB_CACHE}] if d.from_hub else []
    service: dict[str, Any] = {
        "image": d.image,
        "entrypoint": ["vllm", "serve"],
        "command": [_literal(word) for word in d.argv],
        "environment": {n: _literal(v) for n, v in d.environment.items()} | dict.fromkeys(d.secrets),
        "ports": [f"{d.port + replica}:{d.port}"],
        "restart": "unless-stopped",
        "healthcheck": {
            "test": ["CMD", "python3", "-c", ask],
            "interval": "10s",
            "timeout": "10s",
            "retries": 3,
            "start_period": f"{math.ceil(d.startup_allowance_s)}s",
        },
        "labels": {f"sweep.{name}": _literal(value) for name, value in d.origin_labels.items()},
    }
    if volumes := [*binds, *cache]:
        service["volumes"] = volumes
    if d.shared_memory_gib is not None:
        service["shm_size"] = f"{d.shared_memory_gib}gb"
    if d.gpus:
        first = replica * d.gpus
        which = {"device_ids": [str(first + i) for i in range(d.gpus)]} if many else {"count": d.gpus}
        gpu = {"driver": "nvidia", **which, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [gpu]}}}
    else:
        if d.cpu_cores is not None:
            first = replica * d.cpu_cores
            service["cpuset"] = f"{first}-{first + d.cpu_cores - 1}"
        service["cap_add"] = ["SYS_NICE"]  # vLLM binds memory to its cores' NUMA node
    return service


def kubernetes(d: Deployment) -> list[dict[str, Any]]:
    """A Deployment and a Service."""
    selector = {"app.kubernetes.io/name": "vllm", "app.kubernetes.io/instance": d.name}
    annotations = {f"sweep/{name}": value for name, value in d.origin_labels.items()}
    metadata = {"name": d.name, "labels": selector, "annotations": annotations}
    pod = {
        # Variables of a Service that is called "vllm" would be taken for vLLM's own, VLLM_PORT first.
        "enableServiceLinks": False,
        "containers": [_container(d)],
    }
    if volumes := _volumes(d):
        pod["volumes"] = [{"name": name, **source} for name, source, _ in volumes]
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": d.replicas,
                "selector": {"matchLabels": selector},
                "progressDeadlineSeconds": math.ceil(d.startup_allowance_s) + 60,
                "template": {"metadata": {"labels": selector, "annotations": annotations}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {
                "type": "ClusterIP",
                "selector": selector,
                "ports": [{"name": "http", "port": d.port, "targetPort": "http", "protocol": "TCP"}],
            },
        },
    ]


def _container(d: Deployment) -> dict[str, Any]:
    secret: dict[str, Any] = {"name": SECRET_NAME, "optional": True}
    env: list[dict[str, Any]] = [{"name": name, "value": _literal(value)} for name, value in d.environment.items()]
    env += [{"name": name, "valueFrom": {"secretKeyRef": {**secret, "key": name}}} for name in d.secrets]
    health: dict[str, Any] = {
        "httpGet": {"path": HEALTH, "port": "http"},
        "periodSeconds": _PROBE_PERIOD_S,
        "timeoutSeconds": 5,
    }
    container: dict[str, Any] = {
        "name": "vllm",
        "image": d.image,
        "command": ["vllm", "serve"],
        "args": [_literal(word) for word in d.argv],
        "env": env,
        "ports": [{"name": "http", "containerPort": d.port, "protocol": "TCP"}],
        "resources": _resources(d),
        "startupProbe": {**health, "failureThreshold": math.ceil(d.startup_allowance_s / _PROBE_PERIOD_S)},
        "readinessProbe": {**health, "failureThreshold": 2},
        "livenessProbe": {**health, "failureThreshold": 6},
    }
    if mounts := [{"name": name, **mount} for name, _, mount in _volumes(d)]:
        container["volumeMounts"] = mounts
    if not d.gpus:
        container["securityContext"] = {"capabilities": {"add": ["SYS_NICE"]}}
    return container


def _resources(d: Deployment) -> dict[str, Any]:
    """What was measured: GPUs, or cores. Host memory was not, so none is asked for."""
    if d.gpus:
        return {"limits": {"nvidia.com/gpu": d.gpus}}
    return {} if d.cpu_cores is None else {"requests": {"cpu": d.cpu_cores}, "limits": {"cpu": d.cpu_cores}}


def _volumes(d: Deployment) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, source, mount) of each."""
    found: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (f"checkpoint-{i}", {"hostPath": {"path": path}}, {"mountPath": path, "readOnly": True})
        for i, path in enumerate(d.mounts)
    ]
    if d.from_hub:
        found.append(("huggingface", {"emptyDir": {}}, {"mountPath": _HUB_CACHE}))
    if d.shared_memory_gib is not None:
        memory = {"medium": "Memory", "sizeLimit": f"{d.shared_memory_gib}Gi"}
        found.append(("shared-memory", {"emptyDir": memory}, {"mountPath": "/dev/shm"}))
    return found


def autoscaler(d: Deployment) -> dict[str, Any] | None:
    """A HorizontalPodAutoscaler that keeps each replica at the measured load; None if that load is not known."""
    if d.requests_in_flight is None:
        return None
    target = {"type": "AverageValue", "averageValue": str(d.requests_in_flight)}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": d.name},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": d.name},
            "minReplicas": d.replicas,
            "maxReplicas": 2 * d.replicas,
            "metrics": [{"type": "Pods", "pods": {"metric": {"name": IN_FLIGHT_METRIC}, "target": target}}],
        },
    }


def _literal(value: str) -> str:
    """A dollar sign stands for itself: compose and Kubernetes both substitute variables, and both take $$ for $."""
    return value.replace("$", "$$")
