"""`python -m lightning_sparse advise --from-log FOLDER`: shows the measurements of `auto_ddp` or `auto_hsdp`."""

from __future__ import annotations

import re
from pathlib import Path

LINK, MESSAGE, CHOSEN = "link_mbit", "message_ms", "chosen_ms"
BOUND, MEASURED = "_at_least_ms", "_ms"
"""Ends of the other scalars' names, which contain the candidate's."""


def table(folder: Path) -> str:
    """Return the newest measurements of a choice as a text.

    Args:
        folder: a folder of TensorBoard logs, or one log.

    Raises:
        ValueError: there is no such log.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    if not folder.exists():
        raise ValueError(f"{str(folder)!r} does not exist. Give a run's folder, such as 'lightning_logs/version_0'.")
    logs = [folder] if folder.is_file() else folder.rglob("events.out.tfevents.*")
    files = sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True)
    for file in files:
        log = EventAccumulator(str(file), size_guidance={"scalars": 0})
        log.Reload()
        # A logger with a prefix writes it before each name, and a hyphen.
        tags = (re.fullmatch("(?:.*-)?auto_(?:ddp|hsdp)/(.*)", tag) for tag in log.Tags()["scalars"])
        last = {tag[1]: log.Scalars(tag[0])[-1] for tag in tags if tag}
        if CHOSEN in last:
            step = last[CHOSEN].step
            return _text(file, step, {tag: event.value for tag, event in last.items() if event.step == step})
    no_scalars = f"{len(files)} event files, but no scalars of auto_ddp or auto_hsdp"
    found = no_scalars if files else "no event file of TensorBoard"
    raise ValueError(
        f"{str(folder)!r} has {found}. Give the folder of a run with strategy='auto_ddp' and a TensorBoardLogger. It "
        f"logs when it has decided, after 53 steps at the earliest."
    )


def _text(file: Path, step: int, values: dict[str, float]) -> str:
    link, message, chosen = (values.pop(name) for name in (LINK, MESSAGE, CHOSEN))
    rows = []
    for tag, ms in sorted(values.items(), key=lambda item: item[1]):
        end = BOUND if tag.endswith(BOUND) else MEASURED
        name, least = tag.removesuffix(end), "at least" if end == BOUND else ""
        rows.append(f"{name:18}{least:>10}{ms:10.1f}{'  trains' if ms == chosen else ''}")
    title = f"{file}, step {step}: the link carries {link:.3g} Mbit/s, {message:.2g} ms a message."
    return "\n".join([title, "", f"{'':28}{'ms/step':>10}", *rows])
