"""The page as text: figures, intervals, sentences, tables, size, and that nothing of the records can break out."""

import html.parser
import json
import math
import re
from pathlib import Path

import pytest
from records import a_table, made_up
from scipy import stats

from rtopk.tools.report import summary
from rtopk.tools.report.inputs import Inputs, Study, read
from rtopk.tools.report.measurements import show
from rtopk.tools.report.page import Page
from rtopk.tools.report.plots import per_round, spent
from rtopk.tools.report.series import collect, estimate
from rtopk.tools.show import palette

RESULTS = Path(__file__).parents[3] / "results"


@pytest.fixture(scope="module")
def text():
    return Page(Inputs(a_table(points=12))).html()


def test_intervals_are_those_of_scipy():
    values = [90.1, 91.5, 90.7, 92.0]
    low, high = stats.t.interval(0.95, 3, loc=91.075, scale=stats.sem(values))
    found = estimate(values)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))
    assert math.isnan(estimate([1.0]).half)


def test_series_join_seeds_and_are_named_by_what_differs():
    runs = [made_up(seed=s) for s in (0, 1)] + [made_up(mean="received"), made_up("dense", 1.0)]
    (series,) = collect(runs).values()
    assert [one.label for one in series] == ["rtop-k 99 %, mean nodes", "rtop-k 99 %, mean received", "dense"]
    assert [len(one.runs) for one in series] == [2, 1, 1]
    assert [one.dash for one in series] == [0, 1, 0]


def test_the_sentence_says_what_the_figures_say():
    runs = [made_up("dense", 1.0, s, 95.0 + 0.1 * s) for s in range(3)]
    runs += [made_up("top-k", 0.01, s, 93.0 + 0.1 * s**2) for s in range(3)]
    runs += [made_up("rtop-k", 0.01, s, 94.9 + 0.1 * s + 0.05 * (s == 1)) for s in range(3)]
    (series,) = collect(runs).values()
    (text,) = summary.what_it_shows([series])
    assert text.startswith(
        "digits, distributed: rtop-k 99 % reached 95.02 ± 0.26 accuracy and sent 50.0 times fewer"
    )
    assert "which reached 95.10 ± 0.25: -0.08 ± 0.07, behind after correction for 1 test." in text
    for text in summary.what_it_shows([series, series]):  # with a second panel, what was clear is so no more
        assert "-0.08 ± 0.07, level after correction for 2 tests." in text
    (text,) = summary.what_it_shows([series[:2]])
    assert "-1.93 ± 0.29, behind after correction for 1 test." in text
    (alone,) = summary.what_it_shows([collect(runs[::3])["digits, distributed"]])
    assert "-0.10, without an interval" in alone
    (top,) = summary.what_it_shows([series[1:2]])
    assert top.endswith("top-k 99 % reached 93.17 ± 0.52 accuracy.")
    assert summary.WORDS.partition("%")[0] in Page(Inputs(runs)).html().replace("&#x27;", "'")


def test_lower_is_better_for_perplexity():
    runs = [made_up("top-k", 0.01, 0, 120.0), made_up("rtop-k", 0.01, 0, 100.0)]
    for run in runs:
        run["higher_is_better"] = False
    runs += [made_up("dense", 1.0, 0, 90.0)]
    runs[2]["higher_is_better"] = False
    (text,) = summary.what_it_shows(collect(runs).values())
    assert "rtop-k 99 % reached 100.00" in text
    assert "which reached 90.00: +10.00, without" in text  # the score minus that of dense


def test_ledger_and_times_are_the_differences_of_the_records():
    (series,) = collect([made_up(nodes=5)]).values()
    assert per_round(series[0], "sent_bytes") == [20.0] * 5
    assert per_round(series[0], "received_bytes") == [80.0] * 5
    # 0.05 s in ten rounds of five nodes is one millisecond a node and round.
    assert spent(series[0]) == {"gradient": 1.0, "compress": 2.0, "exchange": 1.0, "apply": 2.0}
    assert ">20<" in summary.ledger({"x": series})
    assert ">1,000<" in summary.ledger({"x": series})


def test_the_paper_is_beside_ours_where_a_record_carries_it():
    where = {"table": "table-1", "title": "ResNet-18 on CIFAR-10", "scale": "small"}
    runs = [
        {**made_up("dense", 1.0, score=91.0), "paper": {**where, "row": "baseline", "value": 92.40}},
        {**made_up(score=92.0), "paper": {**where, "row": "rTop-k 99 %", "value": 93.25}},
        {**made_up("top-k", score=88.0), "paper": {**where, "row": "Top-k 99 %", "value": None}},
    ]
    shown = summary.beside_paper(collect(runs))
    assert "Table 1 of the paper: ResNet-18 on CIFAR-10; ours at scale small" in shown
    cells = re.findall(r"<tr><th scope=\"row\">(.*?)</tr>", shown)
    assert [re.sub(r"</?t[hd]>", " ", cell).split() for cell in cells] == [
        ["baseline", "92.40", "91.00", "-1.40", "–", "–", "1"],
        ["rTop-k", "99", "%", "93.25", "92.00", "-1.25", "+0.85", "+1.00", "1"],
        ["Top-k", "99", "%", "–", "88.00", "–", "–", "-3.00", "1"],
    ]
    assert summary.beside_paper(collect([made_up()])) == ""


def test_the_choice_of_learning_rates_is_shown():
    choice = {"kind": "choice", "table": "table-2", "scale": "small", "row": "Top-k 99 %", "metric": "accuracy",
              "grid": [0.005, 0.015], "scores": [10.24, 11.0], "chosen": 0.015}  # fmt: skip
    shown = summary.tuning([choice])
    assert "0.005: 10.24, 0.015: 11.00" in shown
    assert ">0.015<" in shown


def test_a_benchmark_draws_what_it_compares_and_lists_everything():
    rows = [{"d": d, "values": v, "method": m, "total_bits": 40.0 + d}
            for d in (10, 20) for v, m in (("fp32", "rtopk"), ("fp32", "raw64"), ("4bit", "rtopk"))]  # fmt: skip
    html, charts = show(Study("bench", "bench codec", "codec.json", {"rows": rows}))
    assert [series["x"] for series in charts[0]["series"]] == [["d 10", "d 20"]] * 2
    assert html.count("4bit") == 2


def test_a_link_benchmark_has_a_chart_for_each_link():
    row = {"model": "resnet18", "size": 10, "nodes": 4, "mbit": 100.0, "method": "rtopk", "density": 0.001,
           "values": "fp16", "step_ms": 1102.0, "off_ms": 697.0}  # fmt: skip
    rows = [row, {**row, "mbit": None}, {**row, "method": "dense", "density": None, "values": None}]
    html, charts = show(Study("bench link", "bench link", "links.json", {"rows": rows}))
    assert [chart["title"] for chart in charts] == [
        "Milliseconds a step: resnet18, 4 nodes, 100 Mbit/s",
        "Milliseconds a step: resnet18, 4 nodes, no limit",
    ]
    assert charts[0]["series"][0]["x"] == ["rtopk 0.1 % fp16", "dense"]
    assert charts[0]["series"][0]["y"] == [1102.0, 1102.0]
    assert "<caption>resnet18, 4 nodes, no limit</caption>" in html


def test_labels_are_unique_places_are_true_and_the_rule_is_stated():
    """On the records of `rtopk rivals`, where one method stands with several means, r and bits."""
    inputs = read([RESULTS / "rivals-digits.jsonl"])
    panels = collect(inputs.runs)
    for series in panels.values():
        labels = [one.label for one in series]
        assert len(set(labels)) == len(labels)
        assert {"powersgd rank 1", "powersgd rank 2"} <= set(labels)
    labels = {one.label for one in panels["digits, distributed"]}
    assert "rtop-k 99.01 %, r = 2 k, values fp32, mean nodes" in labels
    assert "rtop-k 96.23 %, r = n k, values 4bit, mean nodes" in labels
    page = Page(inputs).html()
    assert summary.RULE.partition("%")[0] in page
    for panel in Page(inputs).data:
        for one, made in zip(panel["series"], panels[panel["title"]], strict=True):
            assert one["sent"] == pytest.approx(
                made.over_runs(lambda run: run["final"]["sent_bytes"]), rel=1e-5
            )
    assert "at" not in panel["series"][0]
    assert 'data-plot="density"' not in page  # constant, as are the bytes
    changing = [made_up(), made_up("top-k")]
    for point in changing[1]["curve"]:
        point["density"] = 1 / point["round"]
    assert 'data-plot="density"' in Page(Inputs(changing)).html()


class Outline(html.parser.HTMLParser):
    """Collect tags, and see that they close in order."""

    VOID = ("meta", "link", "br", "input")

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.headers = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(text):
    outline = Outline()
    outline.feed(text)
    assert outline.open == []
    for tag, attributes in outline.seen:
        for name in ("src", "href"):
            target = attributes.get(name) or attributes.get(f"xlink:{name}") or "#"
            assert target.startswith(("#", "data:")), f"{tag} {name}={target}"
    assert sum(tag == "table" for tag, _ in outline.seen) >= 5
    assert all(attributes.get("scope") in ("row", "col") for tag, attributes in outline.seen if tag == "th")
    ids = [
        attributes["id"]
        for tag, attributes in outline.seen
        if "id" in attributes and tag in ("figure", "section")
    ]
    assert len(ids) == len(set(ids))
    assert (
        sum(tag == "noscript" for tag, _ in outline.seen) == 2
    )  # hides sections of plots alone, and says so


@pytest.mark.slow
def test_a_whole_table_stays_under_three_megabytes():
    rows = [made_up(method, density, seed, 90.0, points=400, setting=setting, nodes=nodes)
            for method in ("dense", "top-k", "random-k", "rtop-k") for density in (0.05, 0.01, 0.001)
            for seed in range(3) for setting in ("distributed", "federated") for nodes in (5, 8)]  # fmt: skip
    assert len(Page(Inputs(rows)).html().encode()) < 3_000_000


def test_records_cannot_break_out_of_the_page():
    evil = "</script><script>alert(1)</script>"
    run = made_up()
    run["config"]["task"] = evil
    run["command"] = f"rtopk train --task '{evil}'"
    run["environment"]["torch"] = evil
    study = Study("bench", evil, evil, {"rows": [{"method": evil, "ms": 1.0}]})
    text = Page(Inputs([run], [study])).html()
    assert evil not in text
    assert "<script>alert" not in text


def test_a_run_that_diverged_is_shown():
    run = made_up("top-k")
    for point in run["curve"][2:]:
        point.update(accuracy=math.nan, loss=math.inf)
    page = Page(Inputs([run, made_up("dense", 1.0)]))
    json.dumps(page.model(), allow_nan=False)
    assert "nan" in summary.methods(page.panels)
    assert page.html()


def test_a_run_without_an_evaluation_yet():
    run = {k: v for k, v in made_up().items() if k not in ("final", "weights", "sent_bytes_per_round")}
    page = Page(Inputs([{**run, "curve": []}]), live=True)
    assert "No evaluation yet" in page.html()
    assert "connect-src 'self'" in page.html()


RISK = {"mean": 0.5, "setting": {"d": 64, "k": 10}}
STUDIES = {
    "bench": {"rows": [{"d": d, "density": x, "method": m, "ms": d / 3, "over_floor": 1.0 + x}
                       for d in (10, 20) for x in (0.1, 0.01) for m in ("rtopk", "topk")]},
    "lab risk": {"base": {}, "bits": [], "needed": {}, "regime": {"k": {"value": -1.0, "half": 0.1}},
                 "sweeps": [{"axis": "k", "risks": {"rtop-k": [RISK, RISK]}, "upper": [1.0, 1.0],
                             "lower": [0.0, 0.1], "slopes": {"rtop-k": {"value": -1.0, "half": 0.1}}}]},
    "lab bounds": {"rows": [{"setting": {"d": 4}, "risk": 1.0, "over_upper": 0.5, "over_lower": 2.0}], "c": 2.0,
                   "C": 0.5, "inside": True},
    "lab convergence": {"problem": {}, "outcomes": [{"k": 5, "T": 100, "measured": 0.1, "bound": [0.5, 0.2]}]},
    "lab inspect": {"task": "digits", "looks": [{"round": 3, "schemes": [
                        {"scheme": "top-k", "r_over_k": 1.0, "error_with_residual": 0.25}]}],
                    "verdict": {"premise": "holds", "parts": {"sparse": True}}, "recommendation": {"k": 7}},
}  # fmt: skip


@pytest.mark.parametrize("kind", STUDIES)
def test_every_study_is_shown(kind):
    study = Study(kind, kind, "x.json", STUDIES[kind])
    shown, charts = show(study)
    assert "<table>" in shown
    assert len(charts) == 1
    assert "plotly.js (basic" in Page(Inputs([], [study])).html()
    if kind == "bench":
        assert charts[0]["y"] == "over floor"
        assert charts[0]["series"][0]["x"] == ["d 10, density 0.1", "d 10, density 0.01", "d 20, density 0.1",
                                               "d 20, density 0.01"]  # fmt: skip


def test_a_page_without_plots_has_no_library():
    study = Study("bench", "bench", "x.json", {"rows": [{"what": "nothing to draw"}]})
    assert "plotly.js (basic" not in Page(Inputs([], [study])).html()


def contrast(one, other):
    """The contrast of WCAG 2."""

    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_on_light_and_dark(text):
    themes = re.findall(r"--back: (#\w+); --ink: (#\w+); --dim: (#\w+); .*?--link: (#\w+);", text)
    assert len(themes) == 2
    for (back, ink, dim, link), colours in zip(themes, (palette.LIGHT, palette.DARK), strict=True):
        assert contrast(back, ink) >= 7
        assert min(contrast(back, dim), contrast(back, link)) >= 4.5
        assert min(contrast(back, colour) for colour in colours) >= 3
