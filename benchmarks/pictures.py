"""Draws the pictures of the README: python benchmarks/pictures.py

`dispatch-combine.svg` shows the data flow, `two-h100.svg` the measured times of results/peers_2xh100.jsonl.
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
PEERS = ROOT / "benchmarks" / "results" / "peers_2xh100.jsonl"
CHART_SMS = 16

STYLE = """<style>
text { font: 14px sans-serif; fill: #222 } .small { font-size: 12px; fill: #555 } .head { font-weight: bold }
rect.token { stroke: #444 } rect.rank { fill: #f6f7f9; stroke: #bbb }
path { stroke: #777; fill: none; marker-end: url(#tip) }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0,0 L8,4 L0,8 z" style="fill:#777;stroke:none;marker-end:none"/></marker></defs>"""
RANK_COLORS = ("#4c78a8", "#f58518")
# Which experts (0, 1 on rank 0; 2, 3 on rank 1) each of the four tokens goes to; two tokens a rank.
PICKS = ((0, 2), (1, 3), (0, 1), (2, 3))


def token(x: float, y: float, source: int, idx: int) -> str:
    """A row of the picture: a box in the colour of the rank that it came from."""
    return (
        f'<rect class="token" x="{x}" y="{y}" width="34" height="20" fill="{RANK_COLORS[source]}"/>'
        f'<text x="{x + 9}" y="{y + 15}" style="fill:#fff">t{idx}</text>'
    )


def flow() -> str:
    """Two ranks with two tokens and two experts each: tokens, rows at the experts, sums."""
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 300" role="img">{STYLE}']
    parts.append("<title>dispatch sends tokens to the ranks of their experts, combine sums the results</title>")
    columns = ((10, 120, "tokens"), (280, 200, "experts"), (620, 130, "sums"))
    for rank in range(2):
        y = 40 + rank * 130
        for x, width, _ in columns:
            parts.append(f'<rect class="rank" x="{x}" y="{y}" width="{width}" height="110" rx="6"/>')
        parts.append(f'<text class="small" x="18" y="{y + 102}">rank {rank}</text>')
        for local in range(2):
            idx = 2 * rank + local
            parts.append(token(50, y + 12 + local * 40, rank, idx))
            parts.append(token(640, y + 12 + local * 40, rank, idx))
            parts.append(f'<text class="small" x="682" y="{y + 27 + local * 40}">sum of 2</text>')
            parts.append(f'<text class="small" x="290" y="{y + 27 + local * 40}">expert {idx}</text>')
    for x, _, name in columns:
        parts.append(f'<text class="head" x="{x}" y="28">{name}</text>')
    parts.append('<text class="head" x="170" y="28">dispatch</text><text class="head" x="515" y="28">combine</text>')
    filled = [0, 0, 0, 0]
    for idx, experts in enumerate(PICKS):
        start = 40 + (idx // 2) * 130 + 22 + (idx % 2) * 40
        for expert in experts:
            end = 40 + (expert // 2) * 130 + 22 + (expert % 2) * 40
            parts.append(token(355 + 44 * filled[expert], end - 10, idx // 2, idx))
            filled[expert] += 1
            parts.append(f'<path d="M92,{start} C180,{start} 190,{end} 274,{end}"/>')
            parts.append(f'<path d="M486,{end} C560,{end} 560,{start} 614,{start}"/>')
    return "\n".join([*parts, "</svg>\n"])


def rows() -> list[dict[str, object]]:
    """The measured rows of the file, those of `CHART_SMS` SMs."""
    lines = [json.loads(line) for line in PEERS.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["kind"] == "peer" and line["sms"] == CHART_SMS]


def chart() -> None:
    """Bars of Weft and of the best peer, with their times; no bar is a model's."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "weft", "svg.fonttype": "none", "font.size": 10})
    measured = rows()
    figure, axes = plt.subplots(figsize=(8.4, 4.2))
    for shift, key, color, label in ((-0.19, "weft", "#4c78a8", "Weft"), (0.19, "best_peer", "#b8bcc4", "best peer")):
        places = [place + shift for place in range(len(measured))]
        bars = axes.barh(places, [row[key] for row in measured], height=0.36, color=color, label=label)
        names = [f"{row[key]} us" + (f" ({row['peer']})" if key == "best_peer" else "") for row in measured]
        axes.bar_label(bars, labels=names, padding=3, fontsize=9)
    axes.set_yticks(range(len(measured)), [str(row["call"]) for row in measured])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(float(str(row[key])) for row in measured for key in ("weft", "best_peer")))
    axes.set_xlabel("us a call; shorter is better")
    date = json.loads(PEERS.read_text(encoding="utf-8").splitlines()[0])["date"]
    figure.suptitle(f"Measured on 2 x H100, {date}: T = 4096, H = 7168, K = 8, E = 256, {CHART_SMS} SMs", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURES / "two-h100.svg", metadata={"Date": None})


if __name__ == "__main__":
    (PICTURES / "dispatch-combine.svg").write_text(flow(), encoding="utf-8")
    chart()
