"""Bash completion: our subcommands, and Hydra's own completion of groups, options and keys after run and plan."""

from __future__ import annotations

from collections.abc import Iterable

from sweep.errors import SweepError

SCRIPT = r"""
_sweep_completion() {
    local IFS=$'\n'
    COMPREPLY=($(sweep completion bash --query "${COMP_LINE:0:$COMP_POINT}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
    # bash splits words at '=': offer only what follows it
    local word="${COMP_LINE:0:$COMP_POINT}"; word="${word##* }"
    [[ $word == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
}
complete -F _sweep_completion sweep
""".strip()

_COMPOSED = ("run", "plan")


def complete(line: str, commands: Iterable[str]) -> list[str]:
    """Candidates for the last word of a command line. Never raises: a completion that fails offers nothing.

    commands: the subcommands there are.
    """
    words = line.split(" ")[1:]
    if len(words) <= 1:
        return [c for c in commands if c.startswith("".join(words))]
    if words[0] not in _COMPOSED:
        return []
    try:
        return _hydra_candidates(" ".join(words[1:]))
    except (SweepError, ImportError, TypeError):
        return []


def _hydra_candidates(line: str) -> list[str]:
    # Hydra has no public completion API; 1.3.8 on Python 3.14 raises TypeError inside it (argparse).
    from hydra._internal.core_plugins.bash_completion import BashCompletion
    from hydra.core.global_hydra import GlobalHydra

    from sweep.compose import CONFIG_NAME, hydra_context

    with hydra_context():
        loader = GlobalHydra.instance().config_loader()
        return sorted(BashCompletion(loader)._query(CONFIG_NAME, line))
