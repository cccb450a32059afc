"""The report: one HTML page that explains a journal, and needs nothing else.

No script, no font, no picture from anywhere: charts are SVG, and a policy in the page forbids it to load anything. It follows the
reader's light or dark setting. Every text of the journal's is escaped, and numbers are numbers.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape

from refold.engine.history.figures import Spread
from refold.engine.history.plain import count, safe
from refold.engine.history.report_data import LifeLine, ReportData, Sample
from refold.engine.history.report_style import STYLE
from refold.scheduler.stall import WAIT_WORDS

WIDTH, LEFT = 1040, 150
_ROW, _CHART = 15, 150
_STATES = ("queued", "running", "preempted", "idle")


def page(data: ReportData, title: str) -> str:
    """The whole page."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{_text(title)}: refold report</title><style>{STYLE}</style></head><body><main>",
        *_head(data, title),
        *_cards(data),
        *_section("Requests", _lives_note(data), _timeline(data)),
        *_section("KV blocks", f"owned, fenced and cached, of {data.num_blocks:,}", _blocks(data)),
        *_section("Queues", "requests running and waiting", _queues(data)),
        *_section("Latency", "in milliseconds", [_latencies(data)]),
        *_section("Waiting", "what requests waited for, all together", [_waits(data)]),
        *_section("Incidents", _incidents_note(data), [_incidents(data)]),
        "<footer>Made by <code>refold report</code> from the journal alone.</footer></main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _text(text: object) -> str:
    return escape(safe(str(text)))


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.1f}"


def _span(nanoseconds: int) -> str:
    seconds = nanoseconds / 1e9
    return (
        f"{seconds:,.2f} s"
        if seconds < 120
        else f"{seconds / 60:,.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:,.1f} h"
    )


def _when(time_ns: int) -> str:
    try:
        return f"{datetime.fromtimestamp(time_ns // 1_000_000_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return f"{time_ns} ns"


def _head(data: ReportData, title: str) -> Iterator[str]:
    models = ", ".join(data.models[:4]) or "no model"
    yield f"<header><h1>{_text(title)}</h1><p>{_text(models)} · {count(data.num_records, 'record')} · "
    yield f"{count(data.num_engines, 'engine')} · from {_text(_when(data.first_ns))}, {_span(data.duration_ns)}</p></header>"


def _cards(data: ReportData) -> Iterator[str]:
    f = data.figures
    cards = [
        ("requests", f"{f.num_requests:,}", f"{f.num_finished:,} finished"),
        ("throughput", f"{f.tokens_per_s:,.1f}", "tokens a second"),
        ("first token", f"{_ms(f.first_token.p50_ns)} ms", f"p99 {_ms(f.first_token.p99_ns)} ms"),
        ("inter-token", f"{_ms(f.inter_token.p50_ns)} ms", f"p99 {_ms(f.inter_token.p99_ns)} ms"),
        ("preemptions", f"{f.num_preemptions:,}", f"{f.num_recomputed_tokens:,} tokens to compute again"),
        ("prefix cache", f"{f.num_cached_tokens:,}", "tokens not computed"),
    ]
    yield '<div class="cards">'
    for name, value, note in cards:
        yield f'<div class="card"><h2>{name}</h2><b>{value}</b><span>{note}</span></div>'
    yield "</div>"


def _section(title: str, note: str, body: Sequence[str]) -> list[str]:
    return [f"<section><h2>{title}</h2><p>{_text(note)}</p>", *body, "</section>"]


def _lives_note(data: ReportData) -> str:
    shown = len(data.lives)
    which = (
        f"{shown} of {data.num_lives:,}, of each stretch of time the one that took longest"
        if shown < data.num_lives
        else f"all {shown}"
    )
    return f"{which}; queued, running, preempted, idle"


# -- charts -----------------------------------------------------------------------------------------------------------


def _x(time_ns: int, data: ReportData) -> float:
    return round(LEFT + (WIDTH - LEFT - 10) * time_ns / max(data.duration_ns, 1), 1)


def _svg(height: int, label: str, body: Sequence[str]) -> list[str]:
    opening = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">'
    return ['<div class="chart">', opening, *body, "</svg></div>"]


def _axis(data: ReportData, height: int) -> Iterator[str]:
    for tick in range(6):
        at_ns = data.duration_ns * tick // 5
        x = _x(at_ns, data)
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="4" y2="{height - 18}"/>'
        anchor = "start" if tick == 0 else "end" if tick == 5 else "middle"
        yield f'<text class="tick" x="{x}" y="{height - 5}" text-anchor="{anchor}">{_span(at_ns)}</text>'


def _timeline(data: ReportData) -> list[str]:
    height = max(len(data.lives), 1) * _ROW + 30
    body = list(_axis(data, height))
    for row, life in enumerate(data.lives):
        body += _life(data, life, 6 + row * _ROW)
    legend = "".join(f'<span><i class="{state}"></i>{state}</span>' for state in _STATES)
    return [f'<div class="legend">{legend}</div>', *_svg(height, "requests over time", body)]


def _life(data: ReportData, life: LifeLine, y: int) -> Iterator[str]:
    name = life.name if len(life.name) <= 20 else f"{life.name[:19]}…"
    yield f'<text class="name" x="{LEFT - 8}" y="{y + 9}" text-anchor="end">{_text(name)}</text>'
    for span in life.spans:
        start, stop = _x(span.start_ns, data), _x(span.stop_ns, data)
        title = f"{life.name}: {span.what} {_span(span.stop_ns - span.start_ns)}; {life.end}"
        yield (
            f'<rect class="{span.what}" x="{start}" y="{y}" width="{max(round(stop - start, 1), 0.7)}" height="{_ROW - 5}" '
            f'rx="2"><title>{_text(title)}</title></rect>'
        )


def _blocks(data: ReportData) -> list[str]:
    layers = [("owned", [s.owned for s in data.samples]), ("fenced", [s.fenced for s in data.samples])]
    layers.append(("cached", [s.cached for s in data.samples]))
    return _stacked(data, layers, data.num_blocks, "KV blocks over time")


def _queues(data: ReportData) -> list[str]:
    layers = [("running", [s.running for s in data.samples]), ("waiting", [s.waiting for s in data.samples])]
    most = max((s.running + s.waiting for s in data.samples), default=0)
    return _stacked(data, layers, most, "queues over time")


def _stacked(data: ReportData, layers: list[tuple[str, list[int]]], most: int, label: str) -> list[str]:
    top, low = 10, _CHART - 22
    body = list(_axis(data, _CHART))
    below = [0] * len(data.samples)
    for name, values in layers:
        above = [min(a + b, max(most, 1)) for a, b in zip(below, values, strict=True)]
        points = _area(data, data.samples, below, above, most, (top, low))
        body.append(
            f'<path class="{name}" d="{points}"><title>{name}, at most {max(values, default=0):,}</title></path>'
        )
        below = above
    body.append(f'<text class="tick" x="{LEFT - 8}" y="{top + 8}" text-anchor="end">{most:,}</text>')
    body.append(f'<text class="tick" x="{LEFT - 8}" y="{low}" text-anchor="end">0</text>')
    legend = "".join(f'<span><i class="{name}"></i>{name}</span>' for name, _ in layers)
    return [f'<div class="legend">{legend}</div>', *_svg(_CHART, label, body)]


def _area(
    data: ReportData, samples: Sequence[Sample], below: list[int], above: list[int], most: int, edges: tuple[int, int]
) -> str:
    """Steps, not slopes: a counter holds until it changes."""
    top, low = edges

    def y(value: int) -> float:
        return round(low - (low - top) * value / max(most, 1), 1)

    xs = [_x(sample.time_ns, data) for sample in samples]
    there: list[str] = []
    for i, x in enumerate(xs):
        there += [f"{x},{y(above[i])}", f"{xs[i + 1] if i + 1 < len(xs) else _x(data.duration_ns, data)},{y(above[i])}"]
    back: list[str] = []
    for i in reversed(range(len(xs))):
        end = xs[i + 1] if i + 1 < len(xs) else _x(data.duration_ns, data)
        back += [f"{end},{y(below[i])}", f"{xs[i]},{y(below[i])}"]
    return f"M{' L'.join([*there, *back])} Z" if there else ""


# -- tables -----------------------------------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(each)}</th>" for each in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="chart"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _latencies(data: ReportData) -> str:
    f = data.figures
    spreads = {"queued": f.queued, "first token": f.first_token, "inter-token": f.inter_token, "total": f.total}
    rows = [[name, *_spread(spread)] for name, spread in spreads.items()]
    return _table(["", "count", "mean", "p50", "p95", "p99", "max"], rows)


def _spread(s: Spread) -> list[str]:
    return [f"{s.count:,}", *map(_ms, (s.mean_ns, s.p50_ns, s.p95_ns, s.p99_ns, s.max_ns))]


def _waits(data: ReportData) -> str:
    if not data.waits:
        return "<p>Nobody waited.</p>"
    most = max(data.waits.values()) or 1
    bars = [
        f'<tr><td>{_text(WAIT_WORDS[reason])}</td><td class="wide"><i class="bar" style="width:{100 * spent / most:.1f}%">'  # type: ignore[index]
        f"</i></td><td>{_span(spent)}</td></tr>"
        for reason, spent in data.waits.items()
    ]
    rows = [[w.request_id, w.words, _span(w.duration_ns), f"{w.start:,}"] for w in data.longest_waits if w.duration_ns]
    longest = _table(["request", "waited for", "how long", "from record"], rows) if rows else ""
    return f'<div class="chart"><table class="bars">{"".join(bars)}</table></div>{longest}'


def _incidents_note(data: ReportData) -> str:
    shown = len(data.incidents)
    return (
        f"the first {shown} of {data.num_incidents:,}"
        if shown < data.num_incidents
        else f"preemptions and lost workers: {shown}"
    )


def _incidents(data: ReportData) -> str:
    if not data.incidents:
        return "<p>None.</p>"
    rows = [[f"{i.position:,}", _span(i.time_ns), i.name, i.words] for i in data.incidents]
    return _table(["record", "at", "who", "what"], rows)
