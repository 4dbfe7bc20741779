#!/usr/bin/env python3
"""Write quantized copies of a Hugging Face checkpoint that vLLM can also serve on a CPU.

    scripts/quantize_checkpoint.py FOLDER [int8 int4 ...]       writes FOLDER-int8, FOLDER-int4, ...

vLLM 0.32 quantizes no dense model online on a CPU without AMX: its fp8 kernels need AMX, and
int8_per_channel_weight_only leaves dense layers as they are. What works there are checkpoints in the compressed-tensors
format. Weights are rounded to nearest, symmetrically, without calibration: a fair example of a format, not the best
that can be made of it.

    int8  8-bit weights with one scale for each output channel, 8-bit activations with one scale for each token
    int4  4-bit weights with one scale for each group of 32 inputs, activations as they are

Embeddings, norms and the output layer keep their precision. Needs torch, safetensors and compressed-tensors, which come
with vLLM.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

GROUP_SIZE = 32
_LINEAR = re.compile(r"\.layers\.\d+\..*_proj\.weight$")

INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZE}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int-quantized", {"weights": INT8_WEIGHTS, "input_activations": INT8_ACTIVATIONS}),
    "int4": ("pack-quantized", {"weights": INT4_WEIGHTS}),
}


def rounded(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., n) float -> int8 values and scales (..., 1), so that the largest magnitude of each row is exact."""
    largest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / largest
    return torch.round(weight / scale).clamp(-largest - 1, largest).to(torch.int8), scale


def int8_tensors(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    values, scale = rounded(weight.float(), 8)
    return {name: values, f"{name}_scale": scale}


def int4_tensors(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    outputs, inputs = weight.shape
    if inputs % GROUP_SIZE:
        sys.exit(f"error: {name} has {inputs} inputs, no multiple of {GROUP_SIZE}\n  fix: use int8 for this model")
    values, scale = rounded(weight.float().reshape(outputs, inputs // GROUP_SIZE, GROUP_SIZE), 4)
    return {
        f"{name}_packed": pack_to_int32(values.reshape(outputs, inputs), 4),
        f"{name}_scale": scale.squeeze(-1).to(weight.dtype),
        f"{name}_shape": torch.tensor([outputs, inputs]),
    }


def quantize(source: Path, target: Path, kind: str) -> None:
    """Write target, complete or not at all."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors*", "SHA256SUMS"))
    make = int8_tensors if kind == "int8" else int4_tensors
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors |= make(name, tensor) if _LINEAR.search(name) else {name: tensor}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial / "model.safetensors")
    layout, group = FORMATS[kind]
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        "ignore": ["lm_head"],
    }
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write quantized copies of a checkpoint, beside it.")
    parser.add_argument("checkpoint", type=Path, help="folder with config.json and *.safetensors")
    parser.add_argument("kinds", nargs="*", choices=[*FORMATS, []], help="default: all")
    arguments = parser.parse_args()
    source: Path = arguments.checkpoint
    if not (source / "config.json").is_file() or not any(source.glob("*.safetensors")):
        sys.exit(f"error: {source} holds no config.json with *.safetensors\n  fix: name a checkpoint folder")
    for kind in arguments.kinds or FORMATS:
        target = source.with_name(f"{source.name}-{kind}")
        quantize(source, target, kind)
        print(f"{kind}: {target}")


if __name__ == "__main__":
    main()
