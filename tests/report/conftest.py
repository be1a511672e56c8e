"""A browser for the pages; where there is none, their tests say so, and fail under CI."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gradaccum.report.page import html
from tests.report import samples

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser():
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        said = "no Chromium here: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(said)
        pytest.skip(said)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        # as root Chromium runs only without its sandbox; the pages are our own
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page, and what it asked for and complained of."""

    def __init__(self, page, file: Path) -> None:
        self.page, self.file = page, file
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        page.goto(file.as_uri())


@pytest.fixture
def show(browser, tmp_path):
    """Opens a diagnosis, or a sample by its name, as people do: from a file."""
    contexts = []

    def opened(made, *, width=1280, scheme="light", **options) -> Opened:
        diagnosis = samples.ALL[made]() if isinstance(made, str) else made
        file = tmp_path / "report 😀 #1.html"
        file.write_text(html(diagnosis), encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **options
        )
        context.set_default_timeout(5000)  # milliseconds; nothing here waits for a host
        contexts.append(context)
        return Opened(context.new_page(), file)

    yield opened
    for context in contexts:
        context.close()
