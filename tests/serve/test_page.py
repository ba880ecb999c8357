"""The page at / in headless Chromium: type, stream, stop, an error; and that it loads nothing from elsewhere."""

import re
import shutil

import httpx
import pytest

from cuq1.serve.settings import Settings
from tests.serve.running import LIMIT, PAUSE, endless, nano_service, open_nano, serving, wait_for
from tests.serve.watched import Watched

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
QUESTION = "Write a Python function `is_even`: Return True for an even number."


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def service():
    """One whose answers can be watched as they come, and stopped, on a GPU too."""
    service = nano_service(lambda: Watched(open_nano()))
    service.engine.pause = PAUSE
    yield service
    assert service.close(drain=False, timeout=LIMIT)


@pytest.fixture(scope="module")
def base_url(service):
    with serving(service) as url:
        yield url


@pytest.fixture
def page(browser, base_url):
    context = browser.new_context(viewport={"width": 1000, "height": 640})
    page = context.new_page()
    page.asked, page.problems = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
    page.goto(base_url)
    yield page
    context.close()


def send(page, text=QUESTION):
    page.fill("#text", text)
    page.keyboard.press("Enter")


def done(page):
    page.wait_for_selector("#send:not([disabled])", timeout=30000)


def last(page, part):
    return page.locator(f"article:last-child .{part}").inner_text()


def test_a_message_is_answered(page, service, base_url, tmp_path):
    assert page.locator("#model").inner_text() == f"{service.model_name} · context {service.context}"
    page.evaluate("window.seen = new Set()")
    page.evaluate(
        "new MutationObserver(() => seen.add(document.querySelector('article:last-child .content')?.textContent))"
        ".observe(document.getElementById('chat'), {subtree: true, childList: true, characterData: true})"
    )
    send(page)
    done(page)
    assert last(page, "content") or last(page, "reasoning")
    assert last(page, "note") == ""
    assert float(page.locator("#speed").inner_text()) > 0
    assert float(page.locator("#accepted").inner_text()) >= 0
    cached, prompt = map(int, page.locator("#cached").inner_text().split("/"))
    assert 0 <= cached < prompt
    assert page.evaluate("seen.size") > 2  # it came in pieces
    send(page, "Why?")
    done(page)
    cached, again = map(int, page.locator("#cached").inner_text().split("/"))
    assert cached >= prompt - 1
    assert again > prompt
    assert page.locator("article").count() == 4
    assert page.problems == []
    assert {re.match(r"[a-z]+://[^/]*|data:", url)[0] for url in page.asked} <= {base_url, "data:"}
    page.screenshot(path=str(tmp_path / "page.png"))
    page.click("#new")
    assert page.locator("article").count() == 0


def test_what_the_model_writes_stays_text(page):
    """An answer is never markup, whatever it says."""
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream("<img src=x onerror=alert(1)>")))
    send(page)
    done(page)
    assert last(page, "content") == "<img src=x onerror=alert(1)>"
    assert page.locator("article img").count() == 0
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream("cut", end="length")))
    send(page)
    done(page)
    assert "cut off" in last(page, "note")


def stream(text, end="stop"):
    return (
        f'data: {{"choices": [{{"delta": {{"content": "{text}"}}, "finish_reason": null}}]}}\n\n'
        f'data: {{"choices": [{{"delta": {{}}, "finish_reason": "{end}"}}]}}\n\ndata: [DONE]\n\n'
    )


def test_stop(page, service):
    with endless(service):
        send(page)
        wait_for(lambda: len(page.locator("article:last-child").inner_text()) > 60)
        page.click("#stop")
        done(page)
    assert last(page, "note") == "stopped"
    wait_for(lambda: not service.worker.busy)
    send(page, "Go on.")
    done(page)
    assert last(page, "note") != "stopped"


def test_an_error_is_shown(page, service):
    send(page, "word " * 70000)
    done(page)
    assert "context" in last(page, "note")
    assert page.locator("article:last-child .error").count() == 1
    page.route("**/v1/chat/completions", lambda route: route.abort())
    send(page)
    done(page)
    assert last(page, "note") != ""


def test_a_key_is_asked_for(browser):
    service = nano_service()
    with serving(service, Settings(api_key="the-key")) as url:
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector("#key")
        send(page)
        done(page)
        assert "key" in last(page, "note")
        page.fill("#key", "the-key")
        send(page)
        done(page)
        assert last(page, "note") == ""
        page.close()
    assert service.close(timeout=LIMIT)


def test_only_its_own_script_runs(base_url):
    policy = httpx.get(base_url).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = httpx.get(base_url).text
    assert len(re.findall("<script", text)) == len(re.findall("'sha256-", policy.split("style-src")[0])) == 1
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)


def test_a_foreign_script_would_not_run(page):
    """The negative control of the policy: the browser keeps to it."""
    page.evaluate(
        "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s)"
    )
    assert page.evaluate("window.ran") is None
    assert any("Content Security Policy" in problem for problem in page.problems)
