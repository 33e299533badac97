"""Headless Chromium, driven over its debugging pipe: JSON messages that end in a zero byte."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time

import pytest


def chromium():
    """The browser's path; skips the test without one."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium on PATH; Debian's package is called chromium")
    return found


class Page:
    """One open page."""

    def __init__(self, commands, answers):
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._session = None
        self._rest = b""
        self.errors = []

    def call(self, method, **parameters):
        """Sends a command and waits for what it gives."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(answer["params"]["exceptionDetails"])

    def _read(self):
        while b"\0" not in self._rest:
            piece = os.read(self._answers, 65536)
            assert piece, "the browser has gone"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, url):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Runtime.enable")
        self.call("Page.enable")
        self.call("Page.navigate", url=url)

    def value(self, expression):
        """What an expression of JavaScript gives, as JSON."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression, seconds=20):
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, (expression, self.value("document.body.innerText"))
            time.sleep(0.02)

    def type(self, selector, text):
        self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press_enter(self, modifiers=0):
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r", "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def click(self, selector):
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector):
        return self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")


@contextlib.contextmanager
def browser(folder):
    """A browser with a profile in `folder`."""
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += [f"--user-data-dir={folder}", "--remote-debugging-pipe", "--disable-background-networking"]
    # The pipe has to be on descriptors 3 and 4.
    redirect = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", redirect, chromium(), *flags],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    page = Page(commands, answers)
    try:
        yield page
        page._session = None
        page.call("Browser.close")
        process.wait(10)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
