"""The command line. Subcommands are ours; on run and plan the rest of the line is Hydra overrides.

Imports live inside the commands: `sweep --help`, `status` and `pick` answer without loading Optuna or Plotly.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sweep.errors import SlaError, StudyError, SweepError, did_you_mean

if TYPE_CHECKING:
    from sweep.decide.opened import Study

EXIT_USER_ERROR = 2
EXIT_INFEASIBLE = 3
EXIT_INTERRUPTED = 130

_EPILOG = """\
examples:
  sweep plan model=llama31_8b hardware=h100x8 workload=chat search_space=dense budget.hours=8
  sweep run  model=llama31_8b hardware=h100x8 workload=chat search_space=dense budget.hours=8
  sweep status runs/my-study
  sweep pick runs/my-study --sla "ttft_p99_ms<=500 itl_p99_ms<=50 quality_kl<=0.02" --minimize cost_usd_per_mtok
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 2 a mistake to mend, 3 no point meets the SLA, 130 interrupted."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown or (rest and not hasattr(args, "overrides")):
        args.parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}", word=(unknown or rest)[0])
    if rest:
        args.overrides += rest
    try:
        status: int = args.command(args)
        return status
    except SweepError as error:
        print(f"sweep: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"sweep: error: no space left on the device of {error.filename or 'a file'}", file=sys.stderr)
        print("  fix: free some; what is recorded is safe, and the same command continues", file=sys.stderr)
        return EXIT_USER_ERROR


class _Parser(argparse.ArgumentParser):
    """Reports a mistake on the command line as every other mistake is reported."""

    def error(self, message: str, word: str = "") -> NoReturn:
        options = [text for action in self._actions for text in action.option_strings]
        near = did_you_mean(word.partition("=")[0], options)
        hint = near if near.startswith("did you mean") else f"see `{self.prog} --help`"
        print(f"{self.prog.split()[0]}: error: {message}\n  fix: {hint}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def _parser() -> _Parser:
    parser = _Parser(
        prog="sweep",
        description="Measure the Pareto front of speed, cost and quality over real vLLM deployments, and pick one.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    for name, command, text in (
        ("run", _run, "run or continue a study"),
        ("plan", _plan, "print what run would do; launches nothing"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides, e.g. model=qwen3_32b")
        sub.add_argument("--config-dir", type=Path, help="a folder with config groups of your own")
        sub.add_argument("--cfg", choices=["job"], help="print the composed config and stop")
        sub.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
        sub.add_argument("--info", choices=["defaults"], help="print the defaults list and stop")
        sub.set_defaults(command=command, parser=sub)
    commands.choices["plan"].add_argument("--json", action="store_true", help="for scripts")

    status = _reader(commands, "status", _status, "what a running or finished study is doing")
    status.add_argument("--json", action="store_true", help="for scripts")

    front = _reader(commands, "front", _front, "print the Pareto front")
    front.add_argument("--objectives", nargs="+", metavar="METRIC", help="other objectives than the study's")
    front.add_argument("--json", action="store_true", help="for scripts")

    pick = _reader(commands, "pick", _pick, "choose the operating point for an SLA")
    pick.add_argument("--sla", required=True, help='for example "ttft_p99_ms<=500 quality_kl<=0.02"')
    target = pick.add_mutually_exclusive_group()
    target.add_argument("--minimize", metavar="METRIC", help="default: the study's first objective")
    target.add_argument("--maximize", metavar="METRIC")
    pick.add_argument("--headroom", type=float, default=0.0, metavar="SHARE", help="share of each bound to leave free")
    pick.add_argument("--confidence", type=float, metavar="P", help="probability, from repeats, asked of each bound")
    pick.add_argument("--traffic-rps", type=float, metavar="RPS", help="mean requests/s: replicas, devices and cost")
    pick.add_argument("--peak-to-mean", type=float, metavar="X", help="peak traffic over mean traffic (default: 2)")
    pick.add_argument("--growth", type=float, metavar="X", help="factor on the traffic to be ready for (default: 1.2)")
    pick.add_argument("--spare", type=int, metavar="N", help="replicas that may fail at the peak (default: 1)")
    pick.add_argument("--json", action="store_true", help="for scripts")

    deploy = _reader(commands, "deploy", _deploy, "write a point as a command, a config file or a manifest")
    chosen = deploy.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--point", metavar="POINT_ID", help="as `sweep pick` and `sweep export` name it")
    chosen.add_argument("--sla", help="deploy what `sweep pick` chooses")
    target = deploy.add_mutually_exclusive_group()
    target.add_argument("--minimize", metavar="METRIC", help="with --sla; default: the study's first objective")
    target.add_argument("--maximize", metavar="METRIC")
    deploy.add_argument("--format", required=True, choices=["serve", "yaml", "compose", "k8s", "systemd"])
    deploy.add_argument("--replicas", type=int, default=1, metavar="N")
    deploy.add_argument("--image", help="container image (default: vLLM's own, of the measured version)")
    deploy.add_argument("--port", type=int, default=8000)
    deploy.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: print it")

    export = _reader(commands, "export", _export, "write every operating point to a .csv or .parquet file")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")

    _reader(commands, "report", _report, "write the self-contained HTML report")

    completion = commands.add_parser("completion", help='print shell completion: eval "$(sweep completion bash)"')
    completion.add_argument("shell", choices=["bash"])
    completion.add_argument("--query", metavar="LINE", help=argparse.SUPPRESS)
    completion.set_defaults(command=_completion, parser=completion)
    return parser


def _reader(commands: Any, name: str, command: Any, text: str) -> argparse.ArgumentParser:
    sub: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    sub.add_argument("study", nargs="?", type=Path, help="study folder (default: the newest under ./runs)")
    sub.set_defaults(command=command, parser=sub)
    return sub


# ---------------------------------------------------------------- run and plan


def _compose(args: argparse.Namespace) -> tuple[Any, Any] | None:
    """(config, space), or None after --cfg or --info printed what was asked."""
    from sweep import compose
    from sweep.space.search_space import make_search_space

    if args.info:
        print(compose.defaults_text(args.overrides, args.config_dir))
        return None
    if args.cfg:
        print(compose.config_text(args.overrides, args.config_dir, resolve=args.resolve), end="")
        return None
    config = compose.load_config(args.overrides, args.config_dir)
    return config, make_search_space(config.space, config.model, config.hardware)


def _plan(args: argparse.Namespace) -> int:
    composed = _compose(args)
    if composed is None:
        return 0
    from sweep.study.plan import estimated_front, make_plan

    plan = make_plan(*composed, cache_dir=_cache_dir())
    front = estimated_front(*composed)
    if args.json:
        print(
            json.dumps({**plan.to_dict(), "estimate": front if isinstance(front, str) else front.to_dict()}, indent=1)
        )
    else:
        print(plan.text())
        print(f"estimate      {front}" if isinstance(front, str) else front.text())
    return EXIT_USER_ERROR if plan.problems else 0


def _run(args: argparse.Namespace) -> int:
    composed = _compose(args)
    if composed is None:
        return 0
    from sweep.decide.opened import open_study
    from sweep.decide.report import write_report
    from sweep.decide.tables import front_text
    from sweep.study.run import run_study

    session = run_study(*composed, cache_dir=_cache_dir())
    study = open_study(session.folder)
    share = session.controller_s / session.wall_s
    print(f"\n{session.reason}")
    print(f"controller's own work: {session.controller_s:.1f} s of {session.wall_s:.0f} s ({share:.1%})")
    print(f"\n{front_text(study)}\n\nreport  {write_report(session.folder)}")
    print(f'next    sweep pick {_shown(session.folder)} --sla "…"')
    return EXIT_INTERRUPTED if session.interrupted else 0


# ---------------------------------------------------------------- reading


def _status(args: argparse.Namespace) -> int:
    from sweep.decide.tables import status_text
    from sweep.results.status import read_status

    study = _open(args.study)
    status = read_status(study.path)
    if args.json:
        print(json.dumps({"study": study.name, "path": str(study.path), "status": status}, indent=1))
    else:
        print(status_text(study, status))
    return 0


def _front(args: argparse.Namespace) -> int:
    from sweep.decide.tables import front_dict, front_text

    study = _open(args.study)
    print(json.dumps(front_dict(study, args.objectives), indent=1) if args.json else front_text(study, args.objectives))
    return 0


def _pick(args: argparse.Namespace) -> int:
    from sweep.decide.capacity import Traffic

    stated = {name: getattr(args, name) for name in ("peak_to_mean", "growth", "spare")}
    stated = {name: value for name, value in stated.items() if value is not None}
    if args.traffic_rps is None and stated:
        raise SlaError(f"--{next(iter(stated)).replace('_', '-')} says nothing without a traffic", "add --traffic-rps")
    result = _open(args.study).pick(
        args.sla,
        minimize=args.minimize,
        maximize=args.maximize,
        headroom=args.headroom,
        confidence=args.confidence,
        traffic=None if args.traffic_rps is None else Traffic(args.traffic_rps, **stated),
    )
    print(json.dumps(result.to_dict(), indent=1) if args.json else result.text())
    return 0 if result.feasible else EXIT_INFEASIBLE


def _deploy(args: argparse.Namespace) -> int:
    from sweep.decide.answer import Infeasible
    from sweep.decide.deploy import artefact

    study = _open(args.study)
    if args.point is not None:
        point = study.point(args.point)
    else:
        result = study.pick(args.sla, minimize=args.minimize, maximize=args.maximize)
        if isinstance(result, Infeasible):
            print(result.text(), file=sys.stderr)
            return EXIT_INFEASIBLE
        point = result.chosen
    text = artefact(point, study, args.format, args.replicas, image=args.image, port=args.port)
    if args.output is None:
        print(text, end="")
        return 0
    try:
        args.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StudyError(f"cannot write '{args.output}': {error.strerror}", "name another file with -o") from error
    print(args.output)
    return 0


def _export(args: argparse.Namespace) -> int:
    print(_open(args.study).export(args.output))
    return 0


def _report(args: argparse.Namespace) -> int:
    from sweep.decide.report import write_report

    print(write_report(_open(args.study).path))
    return 0


def _completion(args: argparse.Namespace) -> int:
    from sweep import completion

    print(completion.SCRIPT if args.query is None else "\n".join(completion.complete(args.query)))
    return 0


def _open(path: Path | None) -> Study:
    """The study at a path, or the one written to last under ./runs."""
    from sweep.decide.opened import STUDY_FILE, open_study

    if path is None:
        studies = sorted(Path("runs").glob(f"*/{STUDY_FILE}"), key=lambda p: p.parent.stat().st_mtime)
        if not studies:
            raise StudyError("no study named, and none under ./runs", "name its folder: sweep status path/to/study")
        path = studies[-1].parent
    return open_study(path)


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sweep"
