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

from sweep.errors import StudyError, SweepError, did_you_mean

if TYPE_CHECKING:
    from sweep.decide.ask import Ask
    from sweep.decide.opened import Study

EXIT_MOVED = 1
EXIT_USER_ERROR = 2
EXIT_INFEASIBLE = 3
EXIT_NOT_VERIFIED = 4
EXIT_INTERRUPTED = 130

# Options of `sweep cost`: the fields of config.CostConfig, whose group in the study's config is the default.
_COST_TERMS = (
    ("price", "USD", "per device-hour (default: the study's)"),
    ("utilization", "SHARE", "share of the measured load that is used at the peak"),
    ("peak_to_mean", "X", "peak traffic over mean traffic"),
    ("starts_per_day", "N", "starts of one replica, each paid for before it serves"),
    ("input_price_ratio", "R", "price of a prompt token as a share of an output token's"),
    ("cached_input_price_ratio", "R", "the same for a prompt token found in the prefix cache"),
    ("margin", "SHARE", "on top of what the devices cost"),
)

_EPILOG = """\
examples:
  sweep plan model=llama31_8b hardware=h100x8 workload=chat search_space=dense budget.hours=8
  sweep run  model=llama31_8b hardware=h100x8 workload=chat search_space=dense budget.hours=8
  sweep status runs/my-study
  sweep pick runs/my-study --sla "ttft_p99_ms<=500 itl_p99_ms<=50 quality_kl<=0.02" --minimize cost_usd_per_mtok
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 2 a mistake to mend, 3 no point meets the SLA, 4 not verified,
    130 interrupted.
    """
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

    explain = _reader(commands, "explain", _explain, "what the study has learnt: what moved the front, what to drop")
    explain.add_argument("--objectives", nargs="+", metavar="METRIC", help="other objectives than the study's")
    explain.add_argument("--load", metavar="LABEL", help="one load only, such as c8")
    explain.add_argument("--technique", metavar="NAME", help="one technique or knob only: kv_cache, max_num_seqs, …")
    explain.add_argument("--point", metavar="POINT_ID", help="whose overrides to explain (default: the first pick)")
    explain.add_argument("--json", action="store_true", help="for scripts")

    versus = commands.add_parser("compare", help="two studies side by side, and what moved")
    versus.add_argument("study_a", type=Path, metavar="STUDY_A")
    versus.add_argument("study_b", type=Path, metavar="STUDY_B", help="is told against the first")
    versus.add_argument("--objectives", nargs="+", metavar="METRIC", help="default: those that both studies have")
    versus.add_argument("--json", action="store_true", help="for scripts")
    versus.set_defaults(command=_compare, parser=versus)

    pick = _reader(commands, "pick", _pick, "choose the operating point for an SLA")
    _sla_options(pick)
    pick.add_argument("--headroom", type=float, metavar="SHARE", help="share of each bound to leave free")
    pick.add_argument("--confidence", type=float, metavar="P", help="probability, from repeats, asked of each bound")
    pick.add_argument("--traffic-rps", type=float, metavar="RPS", help="mean requests/s: replicas, devices and cost")
    pick.add_argument("--peak-to-mean", type=float, metavar="X", help="peak traffic over mean traffic (default: 2)")
    pick.add_argument("--growth", type=float, metavar="X", help="factor on the traffic to be ready for (default: 1.2)")
    pick.add_argument("--spare", type=int, metavar="N", help="replicas that may fail at the peak (default: 1)")
    pick.add_argument("--devices", type=int, metavar="N", help="devices there are for this traffic")
    pick.add_argument("--price", type=float, metavar="USD", help="another price per device-hour than was measured with")
    pick.add_argument("--utilization", type=float, metavar="SHARE", help="share of the measured load that is paid work")
    pick.add_argument("--allow-inferior", action="store_true", help="also formats that may lose too much quality")
    pick.add_argument("--json", action="store_true", help="for scripts")

    verify = _reader(commands, "verify", _verify, "launch the pick fresh and check every bound under harder conditions")
    _sla_options(verify)
    verify.add_argument("--point", metavar="POINT_ID", help="verify this point instead of what `sweep pick` chooses")
    verify.add_argument("--burst", type=float, default=2.0, metavar="CV",
                        help="coefficient of variation of gamma arrivals' gaps (default: 2; 0: none)")  # fmt: skip
    verify.add_argument("--burst-share", type=float, default=1.0, metavar="SHARE",
                        help="mean rate of the bursts as a share of the point's (default: 1)")  # fmt: skip
    verify.add_argument("--longer", type=float, default=1.5, metavar="FACTOR",
                        help="prompts that many times as long (default: 1.5; 1: none)")  # fmt: skip
    verify.add_argument("--soak", metavar="TIME", help="also hold the point's load for that long: 90s, 10m, 2h")
    verify.add_argument(
        "--requests", type=int, metavar="N", help="of each stage but the soak (default: the workload's)"
    )
    verify.add_argument("--json", action="store_true", help="for scripts")

    again = commands.add_parser(
        "revalidate",
        help="after an upgrade, measure the front again and say what moved",
        description="Measure the front of a study, and its baseline, in a new study, and say what moved beyond noise.",
        epilog="exit status: 0 nothing moved beyond noise, 1 something did or no longer works, 2 a mistake to mend",
    )
    again.add_argument("study", type=Path, help="study folder; it is not changed")
    again.add_argument(
        "overrides", nargs="*", metavar="key=value", help="what is new, e.g. engine.python=/opt/new/bin/python"
    )
    again.add_argument("--json", action="store_true", help="for scripts")
    again.set_defaults(command=_revalidate, parser=again)

    archive = commands.add_parser("archive", help="take a study to another machine as one redacted file")
    actions = archive.add_subparsers(title="actions", metavar="ACTION", required=True)
    pack = _reader(actions, "export", _archive_export, "write the archive: records and settings, secrets taken out")
    pack.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: STUDY.sweep.zip here")
    pack.add_argument("--raw", action="store_true", help="with the per-request Parquet files")
    unpack = actions.add_parser("import", help="open an archive as a study folder, to pick from and to continue")
    unpack.add_argument("archive", type=Path)
    unpack.add_argument("--to", type=Path, metavar="FOLDER", help="default: runs/STUDY")
    unpack.add_argument("--relocate", action="append", default=[], metavar="PLACEHOLDER=PATH",
                        help="where a path that was taken out is here, e.g. 'path-1=/models/llama'")  # fmt: skip
    unpack.add_argument("--sha256", metavar="HEX", help="refuse any other file than the one with this checksum")
    unpack.set_defaults(command=_archive_import, parser=unpack)

    watch = _reader(commands, "watch", _watch, "follow a running study in the terminal")
    watch.add_argument(
        "--once", action="store_true", help="print one frame and stop (also where output is no terminal)"
    )
    watch.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="between frames (default: 2)")

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

    show = _reader(commands, "show", _show, "everything known of one operating point, with its proof")
    show.add_argument("--point", required=True, metavar="POINT_ID", help="as `sweep pick` and `sweep export` name it")
    show.add_argument("--json", action="store_true", help="for scripts; with every measurement of the point")

    quality = _reader(commands, "quality", _quality, "quality of every format against the reference, with intervals")
    quality.add_argument("--json", action="store_true", help="for scripts")

    export = _reader(commands, "export", _export, "write every operating point to a .csv or .parquet file")
    export.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")

    scorecard = _reader(commands, "scorecard", _scorecard, "how the ways benchmarks mislead were met in a study")
    scorecard.add_argument("--json", action="store_true", help="for scripts")

    cost = _reader(commands, "cost", _cost, "what each config costs in use, at the highest load that keeps an SLA")
    cost.add_argument("--sla", default="", help="bounds as in `sweep pick`; none: the busiest load")
    for name, kind, text in _COST_TERMS:
        cost.add_argument(f"--{name.replace('_', '-')}", type=float, metavar=kind, help=text)
    cost.add_argument("--json", action="store_true", help="for scripts")

    _reader(commands, "report", _report, "write the self-contained HTML report")

    completion = commands.add_parser("completion", help='print shell completion: eval "$(sweep completion bash)"')
    completion.add_argument("shell", choices=["bash"])
    completion.add_argument("--query", metavar="LINE", help=argparse.SUPPRESS)
    completion.set_defaults(command=_completion, parser=completion)
    return parser


def _subcommands(parser: argparse.ArgumentParser) -> list[str]:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return list(commands.choices)


def _sla_options(parser: argparse.ArgumentParser) -> None:
    bounds = parser.add_mutually_exclusive_group(required=True)
    bounds.add_argument("--sla", help='for example "ttft_p99<=0.5s itl_p99.interactive<=50ms quality_kl<=3ref"')
    bounds.add_argument("--sla-file", type=Path, metavar="YAML", help="bounds, target and traffic from a file")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--minimize", metavar="METRIC", help="default: the study's first objective")
    target.add_argument("--maximize", metavar="METRIC")


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
    from dataclasses import asdict

    from sweep.api import cache_dir
    from sweep.study.forecast import forecast
    from sweep.study.plan import estimated_front, forecast_text, make_plan, with_estimated_times

    plan = make_plan(*composed, cache_dir=cache_dir())
    front = estimated_front(*composed)
    if not isinstance(front, str):
        plan = with_estimated_times(plan, composed[0], front.candidates)
    devices = composed[0].hardware.devices
    if args.json:
        bought = [] if isinstance(front, str) else [asdict(row) for row in forecast(front.candidates, devices)]
        estimate = front if isinstance(front, str) else {**front.to_dict(), "forecast": bought}
        print(json.dumps({**plan.to_dict(), "estimate": estimate}, indent=1))
    else:
        print(plan.text())
        print(f"estimate      {front}" if isinstance(front, str) else front.text())
        print("" if isinstance(front, str) else forecast_text(front, devices))
    return EXIT_USER_ERROR if plan.problems else 0


def _run(args: argparse.Namespace) -> int:
    composed = _compose(args)
    if composed is None:
        return 0
    from sweep.api import cache_dir
    from sweep.decide.opened import open_study
    from sweep.decide.report import write_report
    from sweep.decide.tables import front_text
    from sweep.study.run import run_study

    session = run_study(*composed, cache_dir=cache_dir())
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


def _quality(args: argparse.Namespace) -> int:
    from sweep.decide.quality import quality_checks, quality_warnings, table_lines

    study = _open(args.study)
    frame, warnings = study.quality, quality_warnings(study.meta, study.records)
    if args.json:
        formats = json.loads(frame.to_json(orient="records"))
        print(json.dumps({"formats": formats, "checked": quality_checks(study.meta), "warnings": warnings}, indent=1))
    else:
        checked = [f"checked: {text}" for text in quality_checks(study.meta)]
        print("\n".join([*table_lines(frame), *checked, *(f"warning: {text}" for text in warnings)]))
    return 0


def _front(args: argparse.Namespace) -> int:
    from sweep.decide.tables import front_dict, front_text

    study = _open(args.study)
    print(json.dumps(front_dict(study, args.objectives), indent=1) if args.json else front_text(study, args.objectives))
    return 0


def _explain(args: argparse.Namespace) -> int:
    from sweep.decide.explain import explain

    study = _open(args.study)
    found = explain(study, args.objectives, load=args.load, technique=args.technique, point_id=args.point)
    print(json.dumps(found.to_dict(), indent=1) if args.json else found.text())
    return 0


def _compare(args: argparse.Namespace) -> int:
    from sweep.decide.compare import compare

    found = compare(_open(args.study_a), _open(args.study_b), args.objectives)
    print(json.dumps(found.to_dict(), indent=1) if args.json else found.text())
    return 0


def _pick(args: argparse.Namespace) -> int:
    ask = _asked(args).with_traffic(
        mean_rps=args.traffic_rps, peak_to_mean=args.peak_to_mean, growth=args.growth, spare=args.spare
    )
    ask = ask.but(
        headroom=args.headroom,
        confidence=args.confidence,
        devices=args.devices,
        price_usd_per_device_hour=args.price,
        utilization=args.utilization,
    )
    result = _open(args.study).pick(**ask.arguments(), allow_inferior=args.allow_inferior)
    print(json.dumps(result.to_dict(), indent=1) if args.json else result.text())
    return 0 if result.feasible else EXIT_INFEASIBLE


def _asked(args: argparse.Namespace) -> Ask:
    """Bounds and target of --sla or --sla-file, --minimize and --maximize."""
    from sweep.decide.ask import Ask, read_ask
    from sweep.decide.sla import parse_sla

    ask = Ask(parse_sla(args.sla)) if args.sla_file is None else read_ask(args.sla_file)
    return ask.but(minimize=args.minimize, maximize=args.maximize)


def _verify(args: argparse.Namespace) -> int:
    from sweep.decide.answer import Infeasible
    from sweep.results.status import seconds_of
    from sweep.study.stages import Stages
    from sweep.study.verify import verify

    stages = Stages(
        burst_cv=args.burst or None,
        burst_share=args.burst_share,
        longer=None if args.longer == 1 else args.longer,
        soak_s=None if args.soak is None else seconds_of(args.soak),
        requests=args.requests,
    )
    study, ask = _open(args.study), _asked(args)
    if args.point is not None:
        point = study.point(args.point)
    else:
        result = study.pick(**ask.arguments())
        if isinstance(result, Infeasible):
            print(result.text(), file=sys.stderr)
            return EXIT_INFEASIBLE
        point = result.chosen
    print(f"verifying {point.point_id} of {study.name}", file=sys.stderr)
    sla = ask.sla.resolved(study.operating_points)
    verdict = verify(study, point, sla, stages, lambda phase: print(f"  {phase}", file=sys.stderr))
    print(json.dumps(verdict.to_dict(), indent=1) if args.json else "\n".join(verdict.text_lines()))
    return 0 if verdict.passed else EXIT_NOT_VERIFIED


def _revalidate(args: argparse.Namespace) -> int:
    from sweep.api import cache_dir
    from sweep.study.revalidate import revalidate

    found = revalidate(_open(args.study), args.overrides, cache_dir())
    print(json.dumps(found.to_dict(), indent=1) if args.json else f"\n{found.text()}")
    return EXIT_MOVED if found.moved else 0


def _archive_export(args: argparse.Namespace) -> int:
    from sweep.decide.archive import export_archive

    study = _open(args.study)
    print(export_archive(study, args.output or Path(f"{study.name}.sweep.zip"), raw=args.raw).text())
    return 0


def _archive_import(args: argparse.Namespace) -> int:
    from sweep.decide.archive import import_archive

    print(import_archive(args.archive, args.to, relocate=args.relocate, sha256=args.sha256).text())
    return 0


def _watch(args: argparse.Namespace) -> int:
    from sweep.decide.watch import watch

    watch(_open(args.study).path, once=args.once or not sys.stdout.isatty(), every_s=args.every)
    return 0


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


def _show(args: argparse.Namespace) -> int:
    from sweep.decide.point_text import point_json, point_text

    study = _open(args.study)
    print(json.dumps(point_json(study, args.point), indent=1) if args.json else point_text(study, args.point))
    return 0


def _scorecard(args: argparse.Namespace) -> int:
    from sweep.decide.scorecard import score_card, score_card_text

    study = _open(args.study)
    if args.json:
        print(json.dumps({"study": study.name, "lines": [line.to_dict() for line in score_card(study)]}, indent=1))
    else:
        print(score_card_text(study))
    return 0


def _cost(args: argparse.Namespace) -> int:
    from sweep.decide.invoice import invoices, terms_of
    from sweep.decide.sla import Sla, parse_sla

    study = _open(args.study)
    terms = terms_of(study.config, **{name: getattr(args, name) for name, *_ in _COST_TERMS if name != "price"})
    found = invoices(study, parse_sla(args.sla) if args.sla else Sla(), terms, args.price)
    print(json.dumps(found.to_dict(), indent=1) if args.json else found.text())
    return 0 if found.lines else EXIT_INFEASIBLE


def _export(args: argparse.Namespace) -> int:
    print(_open(args.study).export(args.output))
    return 0


def _report(args: argparse.Namespace) -> int:
    from sweep.decide.report import write_report

    print(write_report(_open(args.study).path))
    return 0


def _completion(args: argparse.Namespace) -> int:
    from sweep import completion

    commands = _subcommands(_parser())
    print(completion.SCRIPT if args.query is None else "\n".join(completion.complete(args.query, commands)))
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
