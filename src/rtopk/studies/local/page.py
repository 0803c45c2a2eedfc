"""What the study of local steps shows: losses, bytes, differences from SparseLoCo, and a picture (docs/gpt.md)."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from rtopk.studies.local import METHODS, OURS, TASKS, LocalResult
from rtopk.tools.show.intervals import plus_minus
from rtopk.tools.show.palette import MARKERS, mixed, style
from rtopk.tools.show.terminal import markdown as markdown_table
from rtopk.tools.show.terminal import save_picture

YARDSTICK = "SparseLoCo"


def marks(task: str) -> tuple[str, str]:
    """Return the lines of the page between which the tables of a task go."""
    command = f"rtopk gpt --task {task} --recorded --write docs/gpt.md --picture {picture(task)}"
    return f"<!-- {task}: begin (written by `{command}`) -->", f"<!-- {task}: end -->"


def picture(task: str) -> Path:
    """Return where the page's picture of a task is."""
    return Path(f"docs/pictures/gpt-{task.removesuffix('-gpt')}.png")


def difference(one: LocalResult, other: LocalResult) -> tuple[float, float]:
    """Return the mean of one loss minus the other with the same seed, and half its 95 % interval."""
    found = one.lead(other)
    return -found.mean, found.half


def published(one: LocalResult) -> float:
    """Return the bytes of a round in SparseLoCo's own encoding."""
    return float(one.records[0]["published_bytes_per_round"])


def markdown(task: str, found: Sequence[LocalResult]) -> str:
    """Return the tables of a task, and what they say of the claim."""
    lines = [f"### {TASKS[task]}", "", f"![Loss against bytes and rounds](pictures/{picture(task).name})"]
    for local_steps in sorted({one.row.run.local_steps for one in found} - {1}):
        here = [one for one in found if one.row.run.local_steps in (1, local_steps)]
        yardstick = next((one for one in here if one.row.label == YARDSTICK), None)
        if yardstick is not None:
            lines += ["", *_table(here, yardstick, local_steps), "", *_verdict(here, yardstick)]
    rates = [
        [f"{one.row.label}, H = {one.row.run.local_steps}", f"{one.final.rate:g}{_edge(one.inner)}",
         f"{one.final.outer_rate:g}{_edge(one.outer)}" if one.outer else None,
         ", ".join(f"{rate:g}: {-one.outer.value(rate):.3f}" for rate in one.outer.tried) if one.outer else None]
        for one in found if one.final is not None
    ]  # fmt: skip
    heads = ["row", "AdamW's rate", "outer rate", "outer rates tried: loss on validation data"]
    lines += ["", "The rates that were chosen; a star: the best is at the edge of those tried.", ""]
    inner = {one.row.label: one.inner for one in found if one.row.label not in OURS}
    for label, tuning in inner.items():
        tried = ", ".join(f"{rate:g}: {-tuning.value(rate):.3f}" for rate in tuning.tried)
        lines.append(f"- AdamW's rate, tuned on {label}: {tried}")
    return "\n".join([*lines, "", *(line.replace("*", "\\*") for line in markdown_table(heads, rates)), ""])


def _edge(tuning: object) -> str:
    return "*" if getattr(tuning, "at_edge", False) else ""


def _table(here: Sequence[LocalResult], yardstick: LocalResult, local_steps: int) -> list[str]:
    rows = []
    for one in here:
        apart, half = difference(one, yardstick)
        apart_text = f"{apart:+.3f}{plus_minus(half, 3)}" if one is not yardstick else None
        score = f"{one.mean:.3f}{plus_minus(one.half_width, 3)}"
        gone = sum(bool(record["diverged"]) for record in one.records)
        forms = [(one.row.label, one.sent_bytes_per_round)]
        if one is yardstick:
            forms = [
                (f"{YARDSTICK}, its own encoding", published(one)),
                ("the same runs, our codec", forms[0][1]),
            ]
        for label, sent in forms:
            rows.append([
                label, score + (f" ({gone} diverged)" if gone else ""), apart_text, str(len(one.records)),
                f"{sent:,.0f}", f"{8 * sent / one.records[0]['entries']:.2f}",
                f"{100 * sent * one.records[0]['final']['round'] / _all_bytes(yardstick):,.0f} %",
            ])  # fmt: skip
    heads = [
        f"H = {local_steps}", "test loss", "minus SparseLoCo's", "seeds", "bytes a round", "bits an entry",
        "bytes of the run, SparseLoCo's own = 100 %",
    ]  # fmt: skip
    return markdown_table(heads, rows)


def _all_bytes(yardstick: LocalResult) -> float:
    return published(yardstick) * float(yardstick.records[0]["final"]["round"])


def _verdict(here: Sequence[LocalResult], yardstick: LocalResult) -> list[str]:
    """Say whether SparseLoCo's loss is had with fewer bytes, and who is beyond it."""
    ours, theirs = yardstick.sent_bytes_per_round, published(yardstick)
    saved = 1 - ours / theirs
    much = "a third" if saved >= 1 / 3 else "less than a third"
    lines = [
        f"- SparseLoCo's loss with fewer bytes: its entries take {theirs:,.0f} bytes a round as published and "
        f"{ours:,.0f} in our codec, {100 * saved:.1f} % fewer: {much}. "
        "The runs are the same, and so is the loss."
    ]
    for words, bytes_ in (("as published", theirs), ("in our codec", ours)):
        told: dict[str, list[str]] = {"lower": [], "higher": [], "undecided": []}
        for one in here:
            if one.row.label in OURS and one.sent_bytes_per_round <= bytes_:
                apart, half = difference(one, yardstick)
                told["undecided" if abs(apart) <= half else "lower" if apart < 0 else "higher"].append(
                    f"{one.row.label} ({apart:+.3f}{plus_minus(half, 3)} with "
                    f"{100 * (1 - one.sent_bytes_per_round / bytes_):.0f} % fewer bytes)"
                )
        said = "; ".join(f"loss {way}: {', '.join(rows) or 'none'}" for way, rows in told.items())
        lines.append(f"- Beyond it, rows of ours with no more bytes than SparseLoCo {words}: {said}.")
    return lines


def draw(task: str, found: Sequence[LocalResult], path: Path) -> None:
    """Draw loss against bytes and rounds, means over seeds, and the ends of the sparse runs larger.

    Dashed and hollow: H is 50. Dotted: from our codec to SparseLoCo's own encoding.
    """
    from matplotlib.figure import Figure

    figure, labels = Figure(figsize=(15, 5.4)), list(METHODS)
    panels = (("sent_bytes", "bytes sent by a rank", 0), ("round", "rounds", 0),
              ("sent_bytes", "bytes sent by a rank, ends of the sparse runs", -1))  # fmt: skip
    for axis, (value, name, first) in zip(figure.subplots(1, 3), panels, strict=True):
        for one in found:
            config, at = one.records[0]["config"], labels.index(one.row.label)
            if first and config["density"] == 1.0:
                continue
            alike = sum(_rule(label) == _rule(one.row.label) for label in labels[:at])
            colour = mixed(style(config["method"])[0], "#ffffff", min(0.6, 0.15 * alike))
            far = one.row.run.local_steps > 15
            points = list(zip(*(record["curve"] for record in one.records), strict=False))[first:]
            x = [mean(run[value] for run in point) for point in points]
            y = [mean(run["loss"] for run in point) for point in points]
            axis.plot(
                x, y, color=colour, marker=MARKERS[at % len(MARKERS)], markersize=6, linewidth=1.1,
                linestyle="--" if far else "-", markerfacecolor="white" if far else colour, markevery=[-1],
                label=f"{one.row.label}, H = {one.row.run.local_steps}",
            )  # fmt: skip
            if first and len(one.records) > 1:
                axis.errorbar(x[-1], y[-1], one.half_width, color=colour, capsize=2)
            if value == "sent_bytes" and one.row.label == YARDSTICK:
                own = published(one) * one.records[0]["final"]["round"]
                axis.plot([x[-1], own], [y[-1], y[-1]], color=colour, linestyle=":", marker="x")
        axis.set(xscale="log", xlabel=name)
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("loss on test data")
    figure.suptitle(f"{TASKS[task]}: a small GPT, four ranks, AdamW")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="lower center", ncol=5, fontsize=8)
    figure.tight_layout(rect=(0, 0.02 + 0.04 * -(-len(found) // 5), 1, 1))
    save_picture(figure, path)


def _rule(label: str) -> str:
    options = METHODS[label]
    return str(options.get("selector", options["preset"]))
