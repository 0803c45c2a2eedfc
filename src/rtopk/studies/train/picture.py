"""Pictures of records: score against bytes sent, one panel per setting."""

from collections.abc import Sequence
from pathlib import Path

from rtopk.studies.train.records import Record
from rtopk.studies.train.summary import Row, summarise

# Okabe and Ito's colours, told apart with any colour vision; a marker each for print.
STYLE = {
    "dense": ("#000000", "s"),
    "top-k": ("#0072B2", "^"),
    "random-k": ("#009E73", "v"),
    "rtop-k": ("#D55E00", "o"),
}


def score_against_bytes(records: Sequence[Record], path: Path) -> None:
    """Draw each run's curve, and where each method ended with its spread over seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = summarise(records)
    settings = list(dict.fromkeys(row.setting for row in rows))
    figure, axes = plt.subplots(
        1, len(settings), figsize=(5.5 * len(settings), 4.2), sharey=True, squeeze=False
    )
    for axis, setting in zip(axes[0], settings, strict=True):
        for row in (row for row in rows if row.setting == setting):
            colour, marker = STYLE[row.method]
            faint = 0.45 if row.density < 0.005 else 1.0  # the stronger compression of the same method
            for record in records:
                if _is(record, row):
                    curve = record["curve"]
                    axis.plot(
                        [p["sent_bytes"] for p in curve], [p[row.metric] for p in curve], color=colour,
                        alpha=0.25 * faint, linewidth=0.9,
                    )  # fmt: skip
            axis.errorbar(
                row.sent_bytes, row.score, yerr=row.spread, color=colour, marker=marker, markersize=8,
                markerfacecolor=colour if faint == 1.0 else "white", capsize=3, linestyle="none",
                label=f"{row.label} ({row.score:.1f})",
            )  # fmt: skip
        axis.set(xscale="log", title=f"{setting} setting", xlabel="bytes sent per node")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    axes[0][0].set_ylabel(f"{rows[0].metric} on held-out data (%)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _is(record: Record, row: Row) -> bool:
    config = record["config"]
    density = 1.0 if config["method"] == "dense" else config["density"]
    return (config["setting"], config["method"], density) == (row.setting, row.method, row.density)
