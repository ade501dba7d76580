# SPDX-License-Identifier: Apache-2.0
"""report.html as a browser sees it: rendered content, no console message, no request."""

import http.server
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from pretrain.report.page import write_report
from tests.pretrain.run_folder import write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)
# What the browser itself asks for on start, whatever the page.
BROWSERS_OWN = re.compile(r"(googleapis|google|gvt1)\.com")


class Browser:
    """Opens pages behind a proxy that records every request and answers none."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.requests: list[str] = []
        self.console: list[str] = []
        requests = self.requests

        class Recorder(http.server.BaseHTTPRequestHandler):
            def handle_one_request(self):
                requests.append(self.rfile.readline(65537).decode(errors="replace").strip())
                self.wfile.write(b"HTTP/1.1 502 refused\r\n\r\n")
                self.close_connection = True

        self.proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
        threading.Thread(target=self.proxy.serve_forever, daemon=True).start()

    def run(self, page: Path, *flags: str) -> str:
        done = subprocess.run(
            [
                CHROMIUM,
                *FLAGS,
                f"--user-data-dir={self.folder / 'profile'}",
                f"--proxy-server=127.0.0.1:{self.proxy.server_port}",
                *flags,
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        self.console += [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return done.stdout

    def foreign_requests(self) -> list[str]:
        return [r for r in self.requests if r and not BROWSERS_OWN.search(r)]


@pytest.fixture
def browser(tmp_path):
    opened = Browser(tmp_path)
    yield opened
    opened.proxy.shutdown()


def test_rendered_page(tmp_path, browser):
    name = "<script>document.title='owned'</script>"
    page = write_report(write_run(tmp_path / "run", name=name))
    dom = browser.run(page, "--window-size=1280,900", "--dump-dom")
    assert browser.console == []
    assert browser.foreign_requests() == []
    assert "owned'" in dom.split("<body>")[0], "the name stands in the title as text"
    assert dom.count("<script") == 0
    assert dom.count("<polyline") == 7, "training and validation twice, three more"
    assert dom.count("<td><code>layers.") == 2
    assert re.search(r"<dt>Validation loss</dt><dd>5\.125", dom)
    assert "step 60 of 60" in dom


def test_the_checks_can_fail(tmp_path, browser):
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://other.test/x.png"><script>console.error("no")</script>')
    browser.run(page, "--dump-dom")
    assert len(browser.console) == 1
    assert browser.foreign_requests() == ["GET http://other.test/x.png HTTP/1.1"]


@pytest.mark.parametrize(
    ("size", "scheme"), [((1280, 2600), "light"), ((1280, 2600), "dark"), ((500, 3200), "light")]
)
def test_picture(tmp_path, browser, size, scheme):
    """The page is not blank, has the scheme's background, and fits the width of the screen."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    page = write_report(write_run(tmp_path / "run"))
    picture = tmp_path / "picture.png"
    dark = ["--force-dark-mode"] if scheme == "dark" else []
    browser.run(page, f"--window-size={size[0]},{size[1]}", f"--screenshot={picture}", *dark)
    with image.open(picture) as opened:
        pixels = opened.convert("RGB")
    assert pixels.size == size
    corner = pixels.getpixel((2, 2))
    assert corner == ((19, 21, 25) if scheme == "dark" else (247, 247, 245))
    # Nothing reaches the right edge: no section is wider than the screen.
    edge = {pixels.getpixel((size[0] - 3, y)) for y in range(0, size[1], 7)}
    assert edge == {corner}
    curve = (116, 166, 255) if scheme == "dark" else (47, 111, 222)
    colors = {c: n for n, c in pixels.getcolors(maxcolors=1 << 24)}
    assert colors.get(curve, 0) > 300, "the loss curve is drawn in its colour"
    assert browser.console == []
