"""A chosen point as something to type or to apply: shell command, vLLM config file, compose, Kubernetes, systemd.

Each artefact says where it comes from in a comment. No secret is ever in one: HF_TOKEN and VLLM_API_KEY are named, and
their values come from the shell, a Kubernetes Secret or an environment file. The same point gives the same text.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sweep.decide.containers import IN_FLIGHT_METRIC, SECRET_NAME, autoscaler, compose, kubernetes
from sweep.decide.deployment import DEFAULT_PORT, Deployment
from sweep.decide.wording import plural
from sweep.errors import ConfigError, did_you_mean
from sweep.results.points import OperatingPoint

if TYPE_CHECKING:
    from sweep.decide.opened import Study

_STANDARD_PYTHON = "/opt/vllm/bin/python"
_SYSTEMD_PLAIN = re.compile(r"[\w@+=:,./-]+")
# YAML 1.2 and Go's YAML read these as numbers or booleans where PyYAML, which writes them, sees plain text.
_READ_OTHERWISE = re.compile(r"[-+.]?\.?\d.*|[yYnN]|~")


def artefact(
    point: OperatingPoint,
    study: Study,
    format: str,
    replicas: int = 1,
    *,
    image: str | None = None,
    port: int = DEFAULT_PORT,
) -> str:
    """The text that deploys a measured point. format: a key of FORMATS. image: for compose and k8s.

    serve, yaml and systemd describe one replica whatever their number. Raises ConfigError for an unknown format,
    replica count or port, StudyError for a point that was not measured.
    """
    if format not in FORMATS:
        raise ConfigError(f"unknown deployment format '{format}'", did_you_mean(format, FORMATS))
    return FORMATS[format](Deployment(point, study, replicas, port, image))


def _serve(d: Deployment) -> str:
    port = [] if d.port == DEFAULT_PORT else [f"--port {d.port}"]
    command = " ".join([d.engine.serve_command(), *port])
    return "\n".join(["#!/bin/sh", *_header(d, _one_replica(d), _export_secrets(d)), command, ""])


def _vllm_yaml(d: Deployment) -> str:
    file = f"{d.name}.yaml"
    env = [f"{name}={shlex.quote(value)}" for name, value in sorted(d.engine.env.items())]
    values: dict[str, Any] = {"model": d.engine.model, "port": d.port}
    for name, value in json.loads(json.dumps(d.engine.nested_args)).items():
        flag = name.replace("_", "-")
        if value is False:
            # vLLM 0.32 drops `flag: false` of a file without a word; `no-flag: true` reaches its parser.
            values[f"no-{flag}"] = True
        elif isinstance(value, list):
            # A list is written as many words; an empty one as the flag alone, as on the command line.
            values[flag] = [json.dumps(v, sort_keys=True) if isinstance(v, dict | list) else v for v in value] or True
        else:
            values[flag] = value
    header = _header(
        d,
        [f"run       {' '.join([*env, 'vllm serve --config', file])}"],
        ["          (environment variables are no part of vLLM's file)"] if env else [],
        _one_replica(d),
        _export_secrets(d),
    )
    return "\n".join([*header, _yaml(values)])


def _compose(d: Deployment) -> str:
    header = _header(
        d,
        ["run       docker compose -f THIS_FILE up -d"],
        [f"secrets   {' and '.join(d.secrets)}: passed through from the shell or an .env file, where set"],
        _image_note(d),
        [f"devices   {plural(d.gpus * d.replicas, 'GPU')} of this host"] if d.gpus else [],
        [f"mounted   {path}" for path in d.mounts],
    )
    return "\n".join([*header, _yaml(compose(d))])


def _kubernetes(d: Deployment) -> str:
    keys = " and ".join(d.secrets)
    header = _header(
        d,
        ["run       kubectl apply -f THIS_FILE"],
        [f"secrets   {keys}: read from a Secret named {SECRET_NAME}, where it exists:"],
        [f"          kubectl create secret generic {SECRET_NAME} --from-env-file=FILE"],
        _image_note(d),
        [f"devices   {plural(d.gpus, 'GPU')} a replica, {d.gpus * d.replicas} in all"] if d.gpus else [],
        [f"mounted   {path} of the node (hostPath): put it there, or mount a volume of yours" for path in d.mounts],
        ["memory    none is requested: host memory was not measured"],
    )
    documents = [_yaml(document) for document in kubernetes(d)]
    scaler = autoscaler(d)
    if scaler is None:
        hint = ["No autoscaler is proposed: the requests in flight at the measured load are not known."]
    else:
        hint = [
            f"To scale at the measured load ({d.requests_in_flight} requests in flight a replica), serve the metric",
            f"{IN_FLIGHT_METRIC} = vllm:num_requests_running + vllm:num_requests_waiting",
            "of each pod through a metrics adapter, and apply this too:",
            "---",
            *_yaml(scaler).splitlines(),
        ]
    return "\n".join([*header, "---\n".join(documents), *_comment(hint), ""])


def _systemd(d: Deployment) -> str:
    python = Path(d.study.config.get("engine", {}).get("python") or _STANDARD_PYTHON)
    python = python if python.is_absolute() else Path(_STANDARD_PYTHON)
    environment_file, home = f"/etc/vllm/{d.name}.env", f"/var/cache/{d.name}"
    env = {**({"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(d.gpus)))} if d.gpus else {}), **d.environment}
    header = _header(
        d,
        [f"install   as /etc/systemd/system/{d.name}.service, then: systemctl enable --now {d.name}"],
        [f"secrets   {' and '.join(d.secrets)}: lines NAME=value of {environment_file} (mode 0600), where it exists"],
        [f"vllm      {python.with_name('vllm')}: change it to where yours is"],
        [f"mounted   {path}: must be readable to every user" for path in d.mounts],
        [f"devices   {plural(d.gpus, 'GPU')}, chosen by CUDA_VISIBLE_DEVICES"] if d.gpus else [],
        _one_replica(d),
    )
    lines = [
        "[Unit]",
        f"Description={_systemd_text(f'vLLM serving point {d.point.point_id} of study {d.study.name}')}",
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(map(_systemd_argument, [str(python.with_name('vllm')), 'serve', *d.argv]))}",
        *(f"Environment={_systemd_word(f'{name}={value}')}" for name, value in {**env, "HOME": home}.items()),
        f"EnvironmentFile=-{environment_file}",
        "DynamicUser=yes",
        f"CacheDirectory={d.name}",
        "Restart=on-failure",
        "RestartSec=10",
        "KillMode=mixed",  # vLLM's first process ends its workers itself
        "TimeoutStopSec=60",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ]
    return "\n".join([*header, *lines])


FORMATS: Mapping[str, Callable[[Deployment], str]] = {
    "serve": _serve,
    "yaml": _vllm_yaml,
    "compose": _compose,
    "k8s": _kubernetes,
    "systemd": _systemd,
}


# ---------------------------------------------------------------- comments


def _header(d: Deployment, *notes: Iterable[str]) -> list[str]:
    return _comment([*d.origin(), *(line for note in notes for line in note)])


def _comment(lines: Iterable[str]) -> list[str]:
    """Comment lines: a line break inside a value starts another one, and none ends in a continuation."""
    return [f"# {part}".rstrip(" \\") for line in lines for part in (line.splitlines() or [""])]


def _export_secrets(d: Deployment) -> list[str]:
    return [f"secrets   export {' and '.join(d.secrets)} before, where needed"]


def _one_replica(d: Deployment) -> list[str]:
    return [] if d.replicas == 1 else [f"replicas  {d.replicas}: this is one, each needs its own port and devices"]


def _image_note(d: Deployment) -> list[str]:
    if d.image_is_what_was_measured:
        return []
    measured = f"vLLM {d.vllm_version}" if d.vllm_version else "an unknown version"
    return [f"image     {measured} was measured, which is no release: name yours with --image"]


# ---------------------------------------------------------------- quoting


class _Dumper(yaml.SafeDumper):
    """Quotes every text that another reader of YAML would not take for text. Repeats values instead of aliasing."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if _READ_OTHERWISE.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _yaml(data: Any) -> str:
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return text


def _systemd_text(text: str) -> str:
    return " ".join(text.split()).replace("%", "%%")


def _systemd_word(word: str) -> str:
    """One word of Environment=, in double quotes where needed: % starts a specifier, \\ an escape."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    escaped = escaped.replace("%", "%%")
    return escaped if _SYSTEMD_PLAIN.fullmatch(word) else f'"{escaped}"'


def _systemd_argument(word: str) -> str:
    """One word of ExecStart=, where $ starts a variable as well."""
    return _systemd_word(word).replace("$", "$$")
