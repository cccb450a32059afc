"""The report: well-formed, self-contained, escaped, and right; drawn by a browser where there is one."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from refold.engine.history.figures import spread
from refold.engine.history.replay import replay
from refold.engine.history.report import page
from refold.engine.history.report_data import MAX_LIVES, gather, thinned
from refold.journal.codec import decode
from refold.journal.events import RequestPreempted
from tests.history.journals import eventful_lives, sealed
from tests.history.planted_journals import sealed as sealed_facts
from tests.history.readers import ListReader
from tests.kit.drive import Drive, config
from tests.kit.long_history import long_history
from tests.kit.simulation import Simulation

VOID = {"meta", "line", "br"}
HOSTILE = "<script>alert(1)</script>\"'&\u202e\x1b[31m"


class Outline(HTMLParser):
    """Checks that every element is closed where it must be, and gathers what the page would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.texts.append(data)


def page_of(records, title="a journal"):
    return page(gather(replay(ListReader(records))), title)


@pytest.fixture(scope="module")
def eventful():
    lives, _ = eventful_lives()
    return sealed(lives)


def test_nothing_is_loaded_and_nothing_runs(eventful):
    text = page_of(eventful)
    outline = Outline(text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "form", "a"} & set(outline.tags)
    assert not [
        name for name, _ in outline.attributes if name.startswith("on") or name in {"src", "href", "xlink:href"}
    ]
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|url\(|@import", text)


def test_hostile_names_are_text():
    drive = Drive(config(model=HOSTILE))
    drive.open()
    drive.submit("<script>alert(1)</script>\"'&", 5, max_tokens=3)
    drive.run()
    text = page_of(sealed([drive.records]), HOSTILE)
    outline = Outline(text)
    assert "script" not in outline.tags
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert any("<script>alert(1)</script>" in each for each in outline.texts)


@pytest.mark.parametrize("seed", range(5))
def test_any_life_has_a_report(seed):
    simulation = Simulation(seed)
    simulation.play()
    Outline(page_of(sealed([simulation.drive.records])))


def test_a_journal_without_requests_has_one():
    drive = Drive(config())
    drive.open()
    text = page_of(sealed([drive.records]))
    assert "Nobody waited." in text
    Outline(text)


def test_the_figures_are_those_of_the_journal(eventful):
    data = gather(replay(ListReader(eventful)))
    preempted = [e for r in eventful for e in decode(r) if isinstance(e, RequestPreempted)]
    assert data.figures.num_preemptions == len(preempted) == 5
    assert (data.figures.num_requests, data.figures.num_finished, data.num_engines) == (7, 7, 2)
    assert data.num_incidents == len(preempted) + 1, "and a lost worker"
    assert len(data.lives) == data.num_lives == 7
    for life in data.lives:
        assert all(a.stop_ns == b.start_ns for a, b in zip(life.spans, life.spans[1:], strict=False))
    text = page_of(eventful)
    for name in ("req-0", "req-5", "late"):
        assert f">{name}</text>" in text


def test_a_long_journal_fits_on_a_page():
    data = gather(replay(ListReader(sealed_facts(list(long_history(30_000, 16))))))
    assert data.num_lives > 2 * MAX_LIVES
    assert len(data.lives) <= MAX_LIVES
    text = page(data, "long")
    assert len(text) < 400_000
    Outline(text)


def test_thinning_keeps_the_peaks():
    from refold.engine.history.report_data import Sample

    samples = [Sample(i, i % 7, 0, 0, 1, 0) for i in range(1000)]
    samples[523] = Sample(523, 99, 0, 0, 1, 0)
    kept = thinned(samples, 50)
    assert len(kept) <= 55
    assert max(sample.owned for sample in kept) == 99


def test_percentiles_are_by_rank():
    found = spread([*range(1, 101)])
    assert (found.p50_ns, found.p95_ns, found.p99_ns, found.max_ns, found.count) == (50, 95, 99, 100, 100)
    assert spread([]).count == 0
    assert spread([7]).p99_ns == 7


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: the page is checked by parsing only")
@pytest.mark.parametrize("scheme", [0, 1])
def test_chromium_draws_it_in_both_schemes_without_a_complaint(eventful, tmp_path, scheme):
    file, picture = tmp_path / "report.html", tmp_path / "report.png"
    file.write_text(page_of(eventful))
    order = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    order += [f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1180,1400", "--hide-scrollbars"]
    order += ["--enable-logging=stderr", "--v=0", f"--screenshot={picture}", file.as_uri()]
    done = subprocess.run(order, capture_output=True, text=True, check=False, timeout=120)
    assert picture.stat().st_size > 20_000, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    background = _first_pixel(picture.read_bytes())
    assert (max(background) < 64) == (scheme == 0), background


def _first_pixel(png: bytes) -> tuple[int, ...]:
    """The colour in the upper left corner, whatever filter its row has."""
    import zlib

    data, offset = b"", 8
    while offset < len(png):
        length = int.from_bytes(png[offset : offset + 4], "big")
        if png[offset + 4 : offset + 8] == b"IDAT":
            data += png[offset + 8 : offset + 8 + length]
        offset += length + 12
    return tuple(zlib.decompress(data)[1:4])
