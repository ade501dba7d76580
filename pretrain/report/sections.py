# SPDX-License-Identifier: Apache-2.0
"""The sections of report.html, each a function from the run's data to HTML text."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from pretrain.environment import NEEDED, OPTIONAL
from pretrain.history import Row
from pretrain.report.charts import Chart, Mark, Series, number, render, smooth
from pretrain.report.run_data import Run

GEMMS = ("fprop", "dgrad", "wgrad")
_FAMILIES = ("nvfp4", "mxfp4", "mxfp8", "fp8", "bf16", "fp16", "fp32")
_SHOWN_EVENTS = 200
_WIDE, _NARROW, _SMALL = (1086, 380), (420, 320), (400, 250)
_VALIDATION_COLORS = ("valid", "valid2", "valid3", "other")
_RIGHT = ' class="right"'
Points = list[tuple[float, float]]


def header(run: Run) -> str:
    """Name, one line of facts, and what could not be read."""
    config = run.config or {}
    model, precision = _section(config, "model"), _section(config, "precision")
    facts = [
        _progress(run),
        model.get("preset") and f"preset {model['preset']}",
        model.get("pattern") and f"pattern {model['pattern']}",
        precision.get("recipe") and f"recipe {precision['recipe']}",
        precision.get("plan") and f"plan {precision['plan']}",
        run.updated and f"last row {datetime.fromtimestamp(run.updated):%Y-%m-%d %H:%M}",
    ]
    lead = " &middot; ".join(escape(str(f)) for f in facts if f)
    problems = "".join(f'<p class="warning">{escape(p)}</p>' for p in run.problems)
    return f'<header><h1>{escape(run.name)}</h1><p class="lead">{lead}</p>{problems}</header>'


def tiles(run: Run) -> str:
    """The figures that a reader asks for first."""
    rows, shown = run.training, []
    for name, points in run.validation.items():
        finite = [(s, v) for s, v in points if math.isfinite(v)]
        if finite:
            last = finite[-1][1]
            best = min(finite, key=lambda p: p[1])
            label = f"Validation loss, {name}" if name else "Validation loss"
            note = f"first {finite[0][1]:.3f}, lowest {best[1]:.3f} at step {best[0]}"
            shown.append((label, f"{last:.3f}", note))
    losses = _points(rows, "loss")
    if losses:
        tail = [v for _, v in losses[-10:]]
        shown.append(
            ("Training loss", f"{statistics.fmean(tail):.3f}", f"mean of {len(tail)} steps")
        )
    tokens = [r["tokens"] for r in rows if math.isfinite(r.get("tokens", math.nan))]
    if tokens:
        total = max(tokens) if tokens == sorted(tokens) and tokens[0] < tokens[-1] else sum(tokens)
        shown.append(("Tokens", number(total, 3), ""))
    speed = [v for _, v in _points(rows, "tokens_per_s")]
    if speed:
        shown.append(("Tokens/s", number(statistics.median(speed), 3), "median of the steps"))
    seconds = [v for _, v in _points(rows, "seconds")]
    if seconds:
        shown.append(("Time in steps", duration(sum(seconds)), ""))
    share = four_bit_share(run.precision)
    if share is not None:
        shown.append(("GEMM work in 4 bits", f"{100 * share:.0f}\u202f%", "of the FLOPs"))
    skipped = sum(1 for r in rows if r.get("skipped", 0) > 0)
    if skipped:
        shown.append(("Skipped steps", str(skipped), ""))
    if not shown:
        return ""
    return '<dl class="tiles card">' + "".join(map(_tile, shown)) + "</dl>"


def curves(run: Run) -> str:
    """Loss large; learning rate, gradient norm and throughput beside each other."""
    losses = _points(run.training, "loss")
    marks = _marks(run)
    window = max(1, len(losses) // 40)
    series = [Series("training", "train", losses, "faint" if window > 1 else "line")]
    keys = [("train", "training", f"{losses[-1][1]:.3f}" if losses else "")]
    if window > 1:
        series.append(Series("", "train", smooth(losses, window)))
        keys[0] = ("train", f"training (line: mean of {window} steps)", keys[0][2])
    for i, (name, points) in enumerate(run.validation.items()):
        finite = [(float(s), v) for s, v in points if math.isfinite(v)]
        color = _VALIDATION_COLORS[min(i, len(_VALIDATION_COLORS) - 1)]
        label = f"validation {name}" if name else "validation"
        series.append(Series(label, color, finite, "points"))
        keys.append((color, label, f"{finite[-1][1]:.3f}" if finite else ""))
    span = _span(run)
    chart = Chart(series, "Loss by step", marks=marks, levels=_levels(run), x_range=span)
    large = f'<div class="wide">{render(chart, *_WIDE)}</div>'
    large += f'<div class="narrow">{render(chart, *_NARROW)}</div>'
    small = [
        ("lr", "Learning rate", "other", False, True),
        ("grad_norm", "Gradient norm", "valid3", None, False),
        ("tokens_per_s", "Tokens/s", "valid2", False, True),
    ]
    figures = [_small_figure(run, *entry, span) for entry in small]
    return (
        "<h2>Curves</h2>"
        f'<figure class="card"><figcaption><h3>Loss</h3>{_keys(keys)}</figcaption>{large}</figure>'
        f'<div class="charts">{"".join(figures)}</div>'
    )


def precision(run: Run) -> str:
    """Share of GEMM work by format, and the format of every GEMM of every layer."""
    rows = _precision_rows(run.precision)
    if not rows:
        return ""
    head = "".join(f"<th{_RIGHT * (c == 'Share')}>{c}</th>" for c in ("Module", "Weight", "Share"))
    head += "".join(f"<th>{g}</th>" for g in GEMMS)
    body = []
    previous = None
    for row in rows:
        group = _layer_of(_module_name(row))
        start = ' class="group"' if previous is not None and group != previous else ""
        previous = group
        cells = [
            f"<td><code>{escape(_module_name(row))}</code>"
            f"<br><small>{escape(_reason(row))}</small></td>",
            f'<td class="chip">{escape(_plain(row.get("shape")))}</td>',
            f"<td{_RIGHT}>{_percent(row.get('flops_share'))}</td>",
            *(f"<td>{_operands(row.get(g))}</td>" for g in GEMMS),
        ]
        body.append(f"<tr{start}>{''.join(cells)}</tr>")
    shares = _shares(run.precision)
    return (
        "<h2>Precision of every GEMM</h2>"
        '<p class="hint">Each cell names the operands of the GEMM, left and right: '
        "activations and weight (fprop), output gradient and weight (dgrad), output gradient and "
        "activations (wgrad). Below the name stands what decided it.</p>"
        + (_share_bar(shares) if shares else "")
        + f'<div class="card scroll tall"><table class="gemms"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def events(run: Run) -> str:
    """What happened: resumes, skipped steps, precision switches, saves."""
    found: list[tuple[int, str, str]] = []
    for row in run.events:
        details = {k: v for k, v in row.items() if k not in ("step", "event")}
        text = ", ".join(f"{k} {_plain(v)}" for k, v in details.items())
        found.append((row["step"], str(row["event"]).replace("_", " "), text))
    told = {row["step"] for row in run.events if row["event"] == "skip"}
    for row in run.training:
        if row.get("skipped", 0) > 0:
            if row["step"] not in told:
                text = f"gradient norm {_plain(row.get('grad_norm'))}"
                found.append((row["step"], "skip", text))
        elif not math.isfinite(row["loss"]):
            found.append((row["step"], "non-finite loss", ""))
    if not found:
        return ""
    found.sort(key=lambda e: e[0])
    hidden = len(found) - _SHOWN_EVENTS
    note = f'<p class="hint">The first {hidden} are left out.</p>' if hidden > 0 else ""
    lines = "".join(
        f'<tr><td class="right">{step}</td><td>{escape(kind)}</td><td>{escape(text)}</td></tr>'
        for step, kind, text in found[-_SHOWN_EVENTS:]
    )
    return (
        f'<h2>Events</h2>{note}<div class="card scroll"><table><thead><tr>'
        '<th class="right" style="width:7em">Step</th><th style="width:14em">Event</th>'
        f"<th>Details</th></tr></thead><tbody>{lines}</tbody></table></div>"
    )


def environment(run: Run) -> str:
    """What the run ran on."""
    if not run.environment:
        return ""
    plain = {k: v for k, v in run.environment.items() if not isinstance(v, Mapping)}
    nested = {k: v for k, v in run.environment.items() if isinstance(v, Mapping)}
    return "<h2>Environment</h2>" + _cards({"machine": plain, **nested}, _spoken)


def configuration(run: Run) -> str:
    """The resolved configuration by section; a file that cannot be parsed as it stands."""
    if run.config:
        return "<h2>Configuration</h2>" + _cards(
            {k: v if isinstance(v, Mapping) else {k: v} for k, v in run.config.items()}
        )
    if run.config_text:
        text = escape(run.config_text)
        return f'<h2>Configuration</h2><div class="card"><pre class="mono">{text}</pre></div>'
    return ""


def four_bit_share(precision_data: Mapping[str, Any]) -> float | None:
    """Share of GEMM FLOPs whose formats are 4-bit, or None where the file does not say."""
    shares = _shares(precision_data)
    if not shares:
        return None
    return sum(v for k, v in shares.items() if _family(k) in ("nvfp4", "mxfp4"))


def duration(seconds: float) -> str:
    """75 -> '1 min 15 s'."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.3g}\u202fs"
    if whole < 3600:
        return f"{whole // 60}\u202fmin {whole % 60}\u202fs"
    return f"{whole // 3600}\u202fh {whole % 3600 // 60}\u202fmin"


def _tile(entry: tuple[str, str, str]) -> str:
    label, value, note = map(escape, entry)
    small = f"<small>{note}</small>" if note else ""
    return f'<div class="tile"><dt>{label}</dt><dd>{value}{small}</dd></div>'


def _progress(run: Run) -> str:
    if not run.training:
        return "no steps yet"
    total = _section(run.config or {}, "train").get("steps")
    last = run.training[-1]["step"]
    return f"step {last} of {total}" if total else f"step {last}"


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _points(rows: Sequence[Row], key: str) -> Points:
    return [(float(r["step"]), r[key]) for r in rows if math.isfinite(r.get(key, math.nan))]


def _span(run: Run) -> tuple[float, float] | None:
    steps = [r["step"] for r in run.training]
    steps += [s for points in run.validation.values() for s, _ in points]
    return (float(min(steps)), float(max(steps))) if steps else None


def _marks(run: Run) -> list[Mark]:
    marks = [
        Mark(
            float(r["step"]),
            f"{_title(str(r['event']))} at step {r['step']}",
            _css(r["event"]),
            _title(str(r["event"])),
        )
        for r in run.events
        if r["event"] in ("resume", "precision_switch", "rollback")
    ]
    for row in run.training:
        if row.get("skipped", 0) > 0 or not math.isfinite(row["loss"]):
            marks.append(Mark(float(row["step"]), f"step {row['step']} was skipped", "skip"))
    return marks[:400]


def _levels(run: Run) -> list[tuple[float, str]]:
    if run.unigram_entropy is None:
        return []
    return [(run.unigram_entropy, f"unigram entropy {run.unigram_entropy:.3f}")]


def _small_figure(
    run: Run,
    key: str,
    title: str,
    color: str,
    log: bool | None,
    from_zero: bool,
    span: tuple[float, float] | None,
) -> str:
    points = _points(run.training, key)
    series = [Series(title.lower(), color, points)]
    window = max(1, len(points) // 40)
    if key != "lr" and window > 1:
        series = [
            Series(title.lower(), color, points, "faint"),
            Series("", color, smooth(points, window)),
        ]
    chart = Chart(series, f"{title} by step", log=log, from_zero=from_zero, x_range=span)
    last = f'<span class="key">last <b>{number(points[-1][1], 3)}</b></span>' if points else ""
    return (
        f'<figure class="card"><figcaption><h3>{title}</h3>{last}</figcaption>'
        f"{render(chart, *_SMALL)}</figure>"
    )


def _keys(keys: Iterable[tuple[str, str, str]]) -> str:
    return "".join(
        f'<span class="key {color}"><i></i>{escape(name)} <b>{escape(value)}</b></span>'
        for color, name, value in keys
    )


def _precision_rows(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = found.get("rows")
    return [r for r in rows if isinstance(r, Mapping)] if isinstance(rows, list) else []


def _shares(found: Mapping[str, Any]) -> dict[str, float]:
    """FLOPs by format, from the rows: a GEMM of two formats counts as `a x b`."""
    shares: dict[str, float] = {}
    for row in _precision_rows(found):
        share = row.get("flops_share")
        if not isinstance(share, int | float) or not math.isfinite(share):
            continue
        for gemm in GEMMS:
            formats = dict.fromkeys(t.split(" ")[0] for t in _texts(row.get(gemm)))
            if formats and share > 0:
                name = " x ".join(formats)
                shares[name] = shares.get(name, 0.0) + share / len(GEMMS)
    return dict(sorted(shares.items(), key=lambda kv: -kv[1]))


def _share_bar(shares: Mapping[str, float]) -> str:
    total = sum(shares.values()) or 1.0
    bars = "".join(
        f'<span class="{_family(k)}" style="flex:{v / total:.4f}" title="{escape(k)}"></span>'
        for k, v in shares.items()
    )
    keys = _keys((_family(k), k, f"{100 * v / total:.1f}\u202f%") for k, v in shares.items())
    return (
        '<div class="card share"><h3>Share of GEMM FLOPs by format</h3>'
        f'<div class="bar">{bars}</div><div class="keys">{keys}</div></div>'
    )


def _module_name(row: Mapping[str, Any]) -> str:
    return _plain(row.get("module") or row.get("name") or "?")


def _layer_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _reason(row: Mapping[str, Any]) -> str:
    return _plain(row.get("rule") or row.get("reason") or row.get("recipe"))


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    values = value if isinstance(value, list) else [value]
    return [_plain(v) for v in values if v not in (None, "")]


def _operands(value: Any) -> str:
    texts = _texts(value)
    if not texts:
        return _plain(None)
    return "<br>".join(_chip(t) for t in dict.fromkeys(texts))


def _percent(value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        return _plain(None)
    return f"{100 * value:.1f}\u202f%" if value >= 0.0005 else "&lt; 0.1\u202f%"


def _family(text: str) -> str:
    words = text.lower().replace("_", " ").split()
    named = {f for w in words for f in [_first_family(w)] if f}
    return named.pop() if len(named) == 1 else "mixed"


def _first_family(word: str) -> str | None:
    return next((f for f in _FAMILIES if word.startswith(f)), None)


def _chip(text: str) -> str:
    name, _, rest = text.partition(" ")
    small = f" <small>{escape(rest)}</small>" if rest else ""
    return f'<span class="chip {_family(name)}"><i></i>{escape(name)}{small}</span>'


def _cards(groups: Mapping[str, Mapping[str, Any]], name: Callable[[str], str] = str) -> str:
    cards = []
    for title, values in groups.items():
        if not values:
            continue
        lines = "".join(
            f'<tr><th>{escape(name(str(k)))}</th><td class="mono">{escape(_plain(v))}</td></tr>'
            for k, v in values.items()
        )
        cards.append(
            f'<div class="card"><h3>{escape(name(str(title)))}</h3>'
            f"<table><tbody>{lines}</tbody></table></div>"
        )
    return f'<div class="facts">{"".join(cards)}</div>'


def _plain(value: Any) -> str:
    if value is None or value == "" or value == [] or value == {}:
        return "\u2013"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value))
    return str(value)


def _title(name: str) -> str:
    return name.replace("_", " ")


def _spoken(name: str) -> str:
    words = {"cpu": "CPU", "gpus": "GPUs", "cuda": "CUDA", "cudnn": "cuDNN", "gib": "GiB"}
    if "-" in name or name in {*NEEDED, *OPTIONAL}:
        return name
    text = " ".join(words.get(w, w) for w in name.split("_"))
    return text[:1].upper() + text[1:] if text[:2] != "cu" else text


def _css(text: Any) -> str:
    return "".join(c if c.isalnum() or c in "_-" else "-" for c in str(text))
