"""The page in a real browser: Debian's Chromium, headless, steered by Selenium; skipped where it is not installed.

No page may write an error to the console or ask the network; the live page may ask its own server only.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from records import a_table, made_up

from rtopk.tools.report.inputs import Inputs, Study
from rtopk.tools.report.page import Page
from rtopk.tools.show import palette

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (apt-get install)"),
    pytest.mark.xdist_group("browser"),
]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]  # fmt: skip


def start(folder, scripts=True):
    selenium = pytest.importorskip("selenium.webdriver")
    options = selenium.ChromeOptions()
    for flag in [*FLAGS, "--window-size=1300,1000", f"--user-data-dir={folder}"]:
        options.add_argument(flag)
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    if not scripts:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    return selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = start(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    rows = [{"d": d, "method": m, "over_floor": 1.2} for d in (10, 20) for m in ("rtopk", "topk")]
    path = tmp_path_factory.mktemp("page") / "report.html"
    study = Study("bench", "bench compress", "bench.json", {"rows": rows})
    path.write_text(Page(Inputs(a_table(seeds=2, points=12), [study])).html())
    return path.as_uri()


def show(browser, address, width=1280, height=900, scheme="light"):
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get("about:blank")  # the browser's own first page may still be loading
    browser.get_log("browser"), browser.get_log("performance")  # what came before is not ours
    browser.get(address)
    until(lambda: browser.execute_script("return document.documentElement.dataset.ready"))


def until(true, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


def requests(browser):
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def test_it_opens_from_disk_without_network_or_errors(browser, page):
    show(browser, page)
    assert browser.get_log("browser") == []
    assert {url.partition(":")[0] for url in requests(browser)} <= {"file", "data", "blob"}
    figures = browser.execute_script("return document.querySelectorAll('figure').length")
    drawn = browser.execute_script("return document.querySelectorAll('figure.drawn .main-svg').length")
    assert figures == 9
    assert drawn >= figures
    assert not browser.find_elements("css selector", "noscript p")
    outside = browser.execute_script(
        "return [...document.querySelectorAll('figure')].filter(f => f.querySelector('.main-svg')"
        ".getBoundingClientRect().right > f.getBoundingClientRect().right + 1).map(f => f.id)"
    )
    assert outside == [], "plots reach into their neighbours"


def test_the_security_policy_stops_the_network(browser, page):
    show(browser, page)
    code = "fetch('http://127.0.0.1:9/').then(() => arguments[0]('through'), () => arguments[0]('stopped'))"
    assert browser.execute_async_script(code) == "stopped"
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]


def traces(browser, figure):
    return browser.execute_script(f"return document.querySelector('#{figure} .plot').data.map(t => t.name)")


def test_methods_are_switched_by_keyboard(browser, page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    show(browser, page)
    assert "random-k 99 %" in traces(browser, "headline-0")
    box = browser.find_element(By.CSS_SELECTOR, "input[value='random-k 99 %']")
    box.send_keys(Keys.SPACE)
    until(lambda: "random-k 99 %" not in traces(browser, "headline-0"))
    assert "random-k 99 %" not in traces(browser, "curve-1")
    assert "rtop-k 99 %" in traces(browser, "headline-0")
    box.send_keys(Keys.SPACE)
    until(lambda: "random-k 99 %" in traces(browser, "headline-0"))


def test_axes_are_chosen(browser, page):
    from selenium.webdriver.common.by import By

    show(browser, page)
    title = "return document.querySelector('#curve-0 .plot').layout.{}axis.title.text"
    assert browser.execute_script(title.format("x")) == "round"
    browser.find_element(By.CSS_SELECTOR, "input[value='bytes']").click()
    until(lambda: browser.execute_script(title.format("x")) == "bytes sent per node")
    browser.find_element(By.CSS_SELECTOR, "input[value='loss']").click()
    until(lambda: browser.execute_script(title.format("y")) == "loss")
    plot = "document.querySelector('#curve-0 .plot')"
    last = f"return {plot}.data.filter(t => t.mode === 'lines+markers')[0].{{}}.at(-1)"
    assert browser.execute_script(last.format("x")) == 12 * 10 * 1000
    assert browser.execute_script(last.format("y")) == 0.25


def mouse(browser, kind, x, y, button="none"):
    event = {
        "type": kind,
        "x": x,
        "y": y,
        "button": button,
        "clickCount": 1,
        "buttons": int(button == "left"),
    }
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)


def test_hover_shows_values_and_drag_zooms(browser, page):
    show(browser, page)
    browser.execute_script("document.querySelector('#curve-0').scrollIntoView({block: 'center'})")
    middle = (
        "const b = [...document.querySelectorAll('#curve-0 {}')].at(-1).getBoundingClientRect();"
        "return [b.x + b.width / 2, b.y + b.height / 2]"
    )
    x, y = browser.execute_script(middle.format(".point"))
    mouse(browser, "mouseMoved", x - 3, y)
    mouse(browser, "mouseMoved", x, y)
    text = until(
        lambda: browser.execute_script("return document.querySelector('#curve-0 .hoverlayer').textContent")
    )
    assert "rtop-k 99.9 %" in text
    assert "accuracy" in text
    span = "return document.querySelector('#curve-0 .plot').layout.xaxis.range"
    before = browser.execute_script(span)
    x, y = browser.execute_script(middle.format(".nsewdrag"))
    mouse(browser, "mouseMoved", x, y)
    mouse(browser, "mousePressed", x, y, "left")
    for step in (20, 60, 120):
        mouse(browser, "mouseMoved", x + step, y + step / 2, "left")
    mouse(browser, "mouseReleased", x + 120, y + 60, "left")
    after = until(lambda: found if (found := browser.execute_script(span)) != before else None)
    assert after[1] - after[0] < before[1] - before[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_a_phone(scheme, browser, page):
    show(browser, page, 375, 800, scheme)
    wide = browser.execute_script(
        "return [document.documentElement.scrollWidth, [...document.querySelectorAll('main *')].filter("
        "e => e.getBoundingClientRect().right > 376 && !e.closest('.scroll, pre, svg, .plot'))"
        ".map(e => e.outerHTML.slice(0, 80))]"
    )
    assert wide == [375, []]
    back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 22, 26)")
    ink = browser.execute_script("return document.querySelector('#curve-0 .plot').layout.font.color")
    assert ink == ("#1b1d21" if scheme == "light" else "#eceef1")
    assert browser.get_log("browser") == []


def test_the_last_colour_of_the_palette_is_its_own(browser, tmp_path):
    """The script wraps round where `palette.slot` does: not before the last method."""
    path = tmp_path / "report.html"
    path.write_text(Page(Inputs([made_up("top-k"), made_up(palette.METHODS[-1])])).html())
    show(browser, path.as_uri())
    code = (
        "return document.querySelector('#headline-0 .plot').data.filter(t => t.marker)"
        ".map(t => [t.marker.symbol, t.marker.color])"
    )
    expected = [[palette.PLOTLY_MARKERS[at], palette.LIGHT[at]] for at in (1, len(palette.METHODS) - 1)]
    assert browser.execute_script(code) == expected


def test_the_first_screen_has_the_headline(browser, page):
    show(browser, page)
    bottom = "return document.querySelector('{}').getBoundingClientRect().bottom"
    assert browser.execute_script(bottom.format("#headline-0 .plot")) < 900
    assert browser.execute_script(bottom.format("#first p:last-child")) < 450


def test_without_scripts_the_tables_stand(page, tmp_path):
    from selenium.webdriver.common.by import By

    browser = start(tmp_path / "profile", scripts=False)
    try:
        browser.get(page)  # without scripts it does not wait for the whole page
        until(lambda: browser.find_elements(By.CSS_SELECTOR, "footer"))
        headings = [h.text for h in browser.find_elements(By.CSS_SELECTOR, "h2") if h.is_displayed()]
        assert "Every method" in headings
        assert "bench compress" in headings
        assert not {"Curves", "Residual"} & set(headings)  # plots alone
        assert "plots need scripts" in browser.find_element(By.TAG_NAME, "body").text
        assert not any(f.is_displayed() for f in browser.find_elements(By.CSS_SELECTOR, "figure"))
        assert not browser.find_element(By.ID, "controls").is_displayed()
        assert browser.find_element(By.CSS_SELECTOR, "#summary td").is_displayed()
    finally:
        browser.quit()


@pytest.mark.slow
def test_the_live_page_follows_a_run(browser, tmp_path):
    """A real run and `rtopk watch` beside it: the page grows by itself, and stays on its server."""
    rtopk = [sys.executable, "-m", "rtopk"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = ["--nodes", "2", "--rounds", "100000", "--evaluate-every", "20", "--out", str(tmp_path / "run")]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = subprocess.Popen([*rtopk, "train", *options], env=environment, **quiet)
    watch = None
    try:
        until(lambda: (tmp_path / "run" / "run.json").exists())
        watch = subprocess.Popen(
            [*rtopk, "watch", str(tmp_path / "run")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**environment, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        address = watch.stdout.readline().split()[2]
        assert address.startswith("http://127.0.0.1:")
        show(browser, address)
        cell = "return document.querySelector('#summary td:last-child')?.textContent"
        count = "return document.querySelector('#curve-0 .plot')?.data[0].x.length"
        first = until(lambda: browser.execute_script(cell))
        length = until(lambda: browser.execute_script(count))
        until(lambda: browser.execute_script(cell) != first and browser.execute_script(count) > length)
        status = "return document.getElementById('status').textContent"
        assert browser.execute_script(status).startswith("Live")
        assert all(url.startswith(address) for url in requests(browser) if url.startswith("http"))
        assert browser.get_log("browser") == []
        watch.send_signal(signal.SIGINT)
        _, errors = watch.communicate(timeout=30)
        assert (watch.returncode, errors.strip()) == (130, "stopped watching")
        until(lambda: "stopped" in browser.execute_script(status))
    finally:
        for process in (run, watch):
            if process is not None and process.poll() is None:
                process.kill()
                process.communicate()
