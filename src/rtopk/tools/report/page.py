"""Inputs -> one HTML page: text and tables, and plots that a script draws; without scripts the tables stand.

The page loads nothing: style, script and data are inside, and its security policy forbids the network. The page of
runs that go on is served on 127.0.0.1, and asks its own server for the news; files are read again only when one of
them has changed. Nothing is written and nobody else is asked.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from string import Template
from urllib.parse import parse_qs, urlsplit

from rtopk.tools.report import plots, summary
from rtopk.tools.report.inputs import Inputs, is_going_on, read, watched
from rtopk.tools.report.measurements import show
from rtopk.tools.report.plots import Plain
from rtopk.tools.report.series import Series, collect
from rtopk.tools.show import palette

HOST = "127.0.0.1"
PLOTS = {  # section of a panel -> heading and what the plots of it show
    "curve": "Curves",
    "ledger": "Bytes of a round",
    "residual": "Residual",
    "density": "Density",
    "time": "Where the time of a round goes",
}
FLAT = {"ledger": ("sent_per_round", "received_per_round"), "density": ("density",)}  # dropped if constant
NOTES = {
    "headline": "Last score against bytes sent per node, with 95 % intervals over seeds; faint lines show the way "
    "there.",
    "curve": "Mean over seeds; the band is its 95 % interval.",
    "ledger": "Bytes that a node sends (thick) and receives (thin) in a round, mean between evaluations.",
    "residual": "Norm of what is kept back for later rounds, mean over nodes and seeds.",
    "density": "Part of the entries that is sent, k / d, by round.",
    "time": "Milliseconds: gradient and compress of one node, exchange and apply of all nodes.",
}


@dataclass
class Page:
    """What a page says, in parts that a live page can renew one by one."""

    inputs: Inputs
    live: bool = False

    @cached_property
    def panels(self) -> dict[str, list[Series]]:
        """Return the series of each panel."""
        return collect(self.inputs.runs)

    @cached_property
    def data(self) -> list[Plain]:
        """Return the numbers behind the plots of each panel."""
        return [plots.panel(title, series) for title, series in self.panels.items()]

    @cached_property
    def studies(self) -> list[tuple[str, str, list[Plain]]]:
        """Return title, tables and charts of each study."""
        return [(study.title, *show(study)) for study in self.inputs.studies]

    def model(self) -> Plain:
        """Return all that the script draws."""
        charts = [chart for _, _, found in self.studies for chart in found]
        return {"panels": self.data, "charts": charts, "live": self.live}

    def parts(self) -> dict[str, str]:
        """Return the pieces of text and tables by name."""
        shown = "".join(f"<p>{escape(text)}</p>" for text in summary.what_it_shows(self.panels.values()))
        if any(sum(not one.is_dense for one in series) > 1 for series in self.panels.values()):
            shown += f"<p>{escape(summary.RULE)}</p>"
        if any(one.is_dense for series in self.panels.values() for one in series if len(series) > 1):
            shown += f"<p>{escape(summary.WORDS)}</p>"
        parts = {
            "run": f"<p>{escape(summary.what_was_run(self.panels, self.inputs.tuning))}</p>"
            if self.panels
            else "",
            "shows": shown,
            "summary": summary.methods(self.panels),
            "paper": summary.beside_paper(self.panels) + summary.tuning(self.inputs.choices),
            "ledger": summary.ledger(self.panels) if self.panels else "",
            "time": summary.times(self.panels),
            "environment": summary.environment(self.panels) if self.panels else "",
        }
        for i, (_, html, _) in enumerate(self.studies):
            parts[f"study-{i}"] = html
        return parts

    def frame(self) -> str:
        """Name what the page's skeleton depends on; a live page that differs in it is loaded anew."""
        labels = [[one.label for one in series] for series in self.panels.values()]
        charts = [[chart["title"] for chart in found] for _, _, found in self.studies]
        shown = [bool(p["series"]) for p in self.data]
        return json.dumps([list(self.panels), labels, shown, charts, bool(summary.beside_paper(self.panels))])

    def html(self) -> str:
        """Return the page."""
        title = "rtopk: " + ("; ".join(self.panels) or ", ".join(title for title, _, _ in self.studies))
        return Template(_asset("page.html")).substitute(
            title=escape(title),
            policy="connect-src 'self'" if self.live else "connect-src 'none'",
            refresh='<noscript><meta http-equiv="refresh" content="5"></noscript>' if self.live else "",
            style=palette.css() + _asset("page.css"),
            main="".join(self._sections()),
            model=_json_for_html({**self.model(), "frame": self.frame(), "markers": palette.PLOTLY_MARKERS}),
            plotly=_asset("plotly-basic.min.js").replace("</script", "<\\/script")
            if self._has_plots()
            else "",
            script=_asset("page.js"),
        )

    def _has_plots(self) -> bool:
        return bool(self.panels) or any(charts for _, _, charts in self.studies)

    def _sections(self) -> Iterator[str]:
        parts = self.parts()
        if self.panels:
            yield _section("first", "What it shows", _part(parts, "run") + _part(parts, "shows"))
            yield '<div id="controls" hidden></div>'
            yield f'<section id="headline">{self._figures("headline")}</section>'
            yield _section("summary", "Every method", _part(parts, "summary"))
            if parts["paper"]:
                yield _section("paper", "Beside the paper", _part(parts, "paper"))
            for plot, heading in PLOTS.items():
                more = _part(parts, plot) if plot in ("ledger", "time") else ""
                figures = self._figures(plot)
                if "<figure" in figures or (more and parts[plot]):
                    yield _section(plot, heading, figures + more)
        number = 0
        for i, (title, _, charts) in enumerate(self.studies):
            html = ""
            for chart in charts:
                html += _figure(f"chart-{number}", chart["title"], f'data-chart="{number}"')
                number += 1
            yield _section(
                f"study-{i}-section", title, f'<div class="figures">{html}</div>' + _part(parts, f"study-{i}")
            )
        if self.panels:
            yield _section("environment", "To repeat it", _part(parts, "environment"))

    def _figures(self, plot: str) -> str:
        found = []
        for i, panel in enumerate(self.data):
            if not panel["series"] or (plot == "time" and not any(one["spent"] for one in panel["series"])):
                continue
            if plot in FLAT and all(plots.is_flat(panel, name) for name in FLAT[plot]):
                continue  # the table has the number
            note = f"{panel['title']}. {NOTES[plot]}"
            data = f'data-plot="{plot}" data-panel="{i}"'
            found.append(_figure(f"{plot}-{i}", note, data))
        return f'<div class="figures">{"".join(found)}</div>'


def _figure(name: str, caption: str, data: str) -> str:
    return (
        f'<figure id="{name}" {data}><div class="plot" role="img" aria-label="{escape(caption)}"></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _section(name: str, heading: str, html: str) -> str:
    return f'<section id="{name}"><h2>{escape(heading)}</h2>{html}</section>'


def _part(parts: Mapping[str, str], name: str) -> str:
    return f'<div data-part="{name}">{parts[name]}</div>'


def _asset(name: str) -> str:
    return (files("rtopk.tools.report") / "assets" / name).read_text(encoding="utf-8")


def _json_for_html(value: object) -> str:
    """Write JSON that cannot end the script element that it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


class Live:
    """The state of the files as a page, made again when they change."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._lock = threading.Lock()
        self._version = ""
        self._page: Page | None = None

    def now(self) -> tuple[str, Page]:
        """Return the version of the files and their page."""
        with self._lock:
            state = json.dumps(watched(self.paths), sort_keys=True).encode()
            version = hashlib.blake2b(state, digest_size=8).hexdigest()
            if self._page is None or version != self._version:
                self._page = Page(read(self.paths), live=True)
                self._version = version
            return version, self._page

    def news(self, seen: str) -> bytes | None:
        """Return what a page needs to renew itself, None if it has seen it all."""
        version, page = self.now()
        if version == seen:
            return None
        going = sum(is_going_on(run) for run in page.inputs.runs)
        news = {
            "version": version,
            "frame": page.frame(),
            "model": page.model(),
            "parts": page.parts(),
            "going": going,
        }
        return json.dumps(news, allow_nan=False).encode()


class Handler(BaseHTTPRequestHandler):
    """Answer for the page and its news; nothing else is served."""

    live: Live
    timeout = 30

    def do_GET(self) -> None:
        """Answer one request."""
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in (HOST, "localhost"):  # a page elsewhere that points its name at us is not ours
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"only 127.0.0.1 is served\n")
            return
        url = urlsplit(self.path)
        try:
            if url.path == "/":
                page = self.live.now()[1].html().encode()
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page)
            elif url.path == "/live.json":
                news = self.live.news(parse_qs(url.query).get("seen", [""])[0])
                status = HTTPStatus.NO_CONTENT if news is None else HTTPStatus.OK
                self._answer(status, "application/json", news or b"")
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is only /\n")
        except ValueError as error:  # the files became unreadable; say so and go on
            self._answer(HTTPStatus.OK, "application/json", json.dumps({"error": str(error)}).encode())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- as above
        """Say nothing: the terminal is the user's."""


def serve(paths: Sequence[Path], port: int, tell: Callable[[str], None]) -> None:
    """Serve until interrupted; `tell` gets the address once it answers."""
    live = Live(paths)
    live.now()  # what cannot be read is said before a server starts
    handler = type("LiveHandler", (Handler,), {"live": live})
    try:
        server = ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        raise OSError(
            f"cannot serve at {HOST}:{port}: {error.strerror}; --port 0 takes a free one"
        ) from error
    with server:
        server.daemon_threads = True
        tell(f"http://{HOST}:{server.server_port}/")
        server.serve_forever(poll_interval=0.2)
