"""The page in a real headless Chromium: prompts, pictures, two users, a process that is killed."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gulliver.app import Page
from gulliver.app.server import open_page
from gulliver.app.worker import Source
from gulliver.video.media import read_frames, write_clip
from tests.app.app_workers import make_run
from tests.patience import patient

CHROMIUM = Path("/usr/bin/chromium")
pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no {CHROMIUM}: apt-get install chromium"),
    pytest.mark.skipif(
        resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY,
        reason="Chromium reserves more addresses than the limit of this process (ulimit -v)",
    ),
]

PLAYING = """last => {
    const clip = document.querySelector("#clip video");
    if (!clip || clip.currentSrc === last) return false;
    return clip.readyState >= 2 && clip.currentTime > 0 && clip.videoWidth && clip.currentSrc;
}"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("browser")
    page = open_page(Source(make_run(folder)), folder / "clips")
    yield page
    page.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A tab of a browser of its own, with the page in it; elements are found by their id."""

    def __init__(self, browser: Any, page: Page) -> None:
        self.context = browser.new_context()
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(patient(60) * 1000)
        self.asked, self.last = list[str](), ""
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(page.url)
        self.tab.wait_for_selector("#make")

    def fill(self, **values: object) -> None:
        """Types into fields."""
        for name, value in values.items():
            self.tab.fill(f"#{name} input, #{name} textarea", str(value))

    def make(self) -> None:
        self.tab.click("#make")

    def told(self, pattern: str) -> str:
        """Waits for a message, and returns it."""
        script = "pattern => new RegExp(pattern).test(document.querySelector('#told').innerText)"
        self.tab.wait_for_function(script, arg=pattern)
        return self.tab.inner_text("#told")

    def playing(self) -> str:
        """Waits until a clip plays that did not play before, and returns its name."""
        handle = self.tab.wait_for_function(PLAYING, arg=self.last)
        self.last = str(handle.json_value())
        return Path(self.last).name

    def made(self) -> str:
        """Has a clip made and waits until it plays."""
        self.make()
        return self.playing()


@pytest.fixture
def tab(browser: Any, page: Page) -> Iterator[Tab]:
    tab = Tab(browser, page)
    yield tab
    tab.context.close()


def clips_of(page: Page) -> Path:
    return Path(page.service._source.run or "").parent / "clips"


def test_prompt_makes_playable_clip_and_seed_changes_it(
    tab: Tab, page: Page, tmp_path: Path
) -> None:
    clips = clips_of(page)
    tab.fill(prompt="the digit 3 moving left", steps=40, seed=1)
    tab.make()
    tab.tab.wait_for_selector("#frames img[src^='data:image/gif']")
    tab.told("Generated in .* with step-00000001")
    first = tab.playing()
    assert "seed 1" in tab.tab.inner_text("#facts")
    tab.fill(seed=2, steps=4)
    second = tab.made()
    picture = write_clip(tmp_path / "p.png", torch.ones(3, 1, 32, 32), 8)
    tab.tab.set_input_files("#picture input[type=file]", picture)
    tab.tab.wait_for_selector("#picture img")
    third = tab.made()
    frames = [read_frames(clips / name) for name in (first, second, third)]
    assert all(clip.shape[1] == 5 for clip in frames)
    assert not torch.equal(frames[0], frames[1])
    assert not torch.equal(frames[1], frames[2])
    assert (clips / third).with_suffix(".picture.png").exists()
    tab.fill(steps=2.5)
    tab.make()
    tab.told("steps must be a whole number, not 2.5")
    tab.tab.reload()
    tab.tab.wait_for_selector("#make")
    tab.fill(prompt="the digit 3 moving left", steps=2)
    broken = tmp_path / "fake.png"
    broken.write_text("no picture")
    tab.tab.set_input_files("#picture input[type=file]", broken)
    tab.tab.wait_for_selector("#picture img", state="attached")
    tab.make()
    tab.told("is not a readable image")
    # Nothing is fetched from elsewhere.
    assert {re.match(r"data:|blob:|http://127\.0\.0\.1:", url) is None for url in tab.asked} == {
        False
    }


@pytest.mark.full
def test_stop_and_a_closed_tab_end_sampling(tab: Tab, browser: Any, page: Page) -> None:
    tab.fill(steps=50_000)
    tab.make()
    tab.told("Step ")
    tab.tab.click("#stop")
    tab.told("Stopped")
    leaving = Tab(browser, page)
    leaving.fill(steps=50_000)
    leaving.make()
    leaving.told("Step ")
    tab.fill(steps=3)
    tab.make()
    tab.told("Waiting: 1 clip is made before")
    leaving.context.close()
    tab.told("Generated in")


@pytest.mark.full
def test_page_follows_training(tab: Tab, page: Page) -> None:
    run = page.service._source.run
    assert run is not None
    tab.tab.click("button[role=tab]:has-text('Training')")
    tab.tab.wait_for_selector("#loss canvas, #loss svg")
    with (run / "log.jsonl").open("a") as log:
        log.write('{"step": 5, "loss": 0.1234}\n{"step": 6, "lo')
    tab.tab.wait_for_function("document.querySelector('#summary').innerText.includes('0.1234')")
