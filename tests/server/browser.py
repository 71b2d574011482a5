"""A Chromium without a window for tests of the page, driven by Playwright. `make test` installs the system's."""
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PLACES = ("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
          "/Applications/Chromium.app/Contents/MacOS/Chromium")


def find_chromium():
    """Its path, by DS4MLX_TEST_CHROMIUM or the names it has; None where there is none."""
    return next(filter(None, (os.environ.get("DS4MLX_TEST_CHROMIUM"), *map(shutil.which, NAMES),
                              *filter(os.path.exists, PLACES))), None)


@contextmanager
def chromium():
    """A running browser; nothing of it stays behind."""
    from playwright.sync_api import expect, sync_playwright
    expect.set_options(timeout=60_000)      # ms; a busy machine is no fault of the page
    found = find_chromium()
    if found is None:
        assert not os.environ.get("CI"), "no Chromium; sh .ci/get-chromium should have installed it"
        pytest.skip("no Chromium was found; install it, or give its path as DS4MLX_TEST_CHROMIUM")
    with sync_playwright() as playwright:
        # No sandbox: root has none. No shared memory: containers have little.
        # /tmp, because its sockets take paths of 104 characters only.
        running = playwright.chromium.launch(executable_path=found, env=os.environ | {"TMPDIR": "/tmp"},
                                             args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield running
        finally:
            running.close()


@dataclass
class Tabs:
    """Pages in a browser. What a page complains of on its console, its policy's refusals among it, is collected."""
    browser: object
    faults: list[str] = field(default_factory=list)

    def open(self, url, *, before=None, **context):
        """A page at `url` in a context of its own. before: JavaScript that runs ahead of the page's."""
        page = self.browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context}).new_page()
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", self._heard)
        if before:
            page.add_init_script(before)
        page.goto(url)
        return page

    def _heard(self, told):
        answered_with_an_error = told.text.startswith("Failed to load resource")
        if told.type in ("error", "warning") and not answered_with_an_error:
            self.faults.append(told.text)

    def close(self):
        for context in self.browser.contexts:
            context.close()


def ask(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answered(page, text):
    """Wait until the last answer holds `text` and is over."""
    from playwright.sync_api import expect
    expect(page.locator(".turn.model").last).to_contain_text(text)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
