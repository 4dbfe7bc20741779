"""Run under the interpreter that holds vLLM: prints one JSON object describing the arguments of its server.

    engine.python sweep/engine/parser_probe.py

Imports vLLM and the standard library only, because that environment need not hold sweep.
"""

import argparse
import json

import vllm
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # before 0.32
    from vllm.entrypoints.openai.cli_args import make_arg_parser


def describe(action: argparse.Action) -> dict:
    boolean = isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0
    choices = None if action.choices is None else [str(c) for c in action.choices]
    kind = getattr(action.type, "__name__", None)
    return {"flags": list(action.option_strings), "choices": choices, "type": kind, "is_bool": boolean}


parser = make_arg_parser(FlexibleArgumentParser())
arguments = {action.dest: describe(action) for action in parser._actions if action.option_strings}
print("SWEEP_PROBE " + json.dumps({"version": vllm.__version__, "arguments": arguments}))
