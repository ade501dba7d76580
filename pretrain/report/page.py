# SPDX-License-Identifier: Apache-2.0
"""report.html: one page that shows a run; `python -m pretrain.report RUN_DIR` rewrites it.

The page is self-contained (no script, no request) and is made from whatever the run folder holds:
a missing or damaged file becomes a sentence on the page, never an exception. Everything that
comes from the run is escaped, and secrets are masked.
"""

import os
import sys
from datetime import datetime
from html import escape
from pathlib import Path

from pretrain.report import numerics, sections
from pretrain.report.run_data import Run, load_run

REPORT_FILE = "report.html"

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(run_dir: Path | str) -> Path:
    """Writes RUN/report.html (temporary name, then rename) and returns its path.

    Raises:
        OSError: the folder cannot be written.
    """
    path = Path(run_dir) / REPORT_FILE
    page = render_page(load_run(path.parent))
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path


def render_page(run: Run) -> str:
    """The whole page as text."""
    body = [
        sections.header(run),
        sections.tiles(run),
        sections.curves(run),
        sections.precision(run),
        numerics.section(run.numerics, run.training),
        sections.events(run),
        sections.environment(run),
        sections.configuration(run),
        f"<footer>nibble, {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}</footer>",
    ]
    return page_of(f"{run.name}: nibble run", "\n".join(filter(None, body)))


def page_of(title: str, body: str, style: str = "") -> str:
    """A self-contained page around `body` (HTML); `style` is added to the style sheet."""
    sheet = Path(__file__).with_name("page.css").read_text(encoding="utf-8") + style
    return _PAGE.format(policy=_POLICY, title=escape(title), style=sheet, body=body)


def main(arguments: list[str] | None = None) -> int:
    """`python -m pretrain.report RUN_DIR...`."""
    folders = sys.argv[1:] if arguments is None else arguments
    if not folders or any(f.startswith("-") for f in folders):
        print("usage: python -m pretrain.report RUN_DIR [RUN_DIR ...]", file=sys.stderr)
        return 2
    status = 0
    for folder in folders:
        if not Path(folder).is_dir():
            print(f"{folder} is not a folder; give a run's folder: runs/NAME", file=sys.stderr)
            status = 2
            continue
        try:
            print(write_report(folder))
        except OSError as error:
            print(f"{folder}/{REPORT_FILE} cannot be written: {error.strerror}", file=sys.stderr)
            status = 2
    return status
