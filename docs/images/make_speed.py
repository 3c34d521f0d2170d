"""Draw docs/images/speed.svg: step time and memory of four models, relative to torch AMP.

    python docs/images/make_speed.py

Reads benchmarks/results/models-h200.json. Each side is shown in its fastest mode.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODELS = {
    "llama-1.3b": "Llama 1.3B, 8 × 2048",
    "gpt2-124m": "GPT-2 124M, 16 × 1024",
    "bert-base": "BERT-base, 32 × 512",
    "vit-l": "ViT-L, 64 × 224²",
}
CONTENDERS = (
    ("AMP", "torch AMP bf16", "#9aa3ad"),
    ("bf16 + split", "narrowcast bf16, split master weights", "#2f7fd6"),
    ("fp8-delayed + split", "narrowcast fp8, split master weights", "#8a5bd1"),
)
WIDTH, LABEL, BAR, GAP, GROUP = 860, 170, 16, 4, 18
PANEL = (WIDTH - LABEL - 60) / 2
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.small { font-size: 11px; fill: #57606a }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #9198a1 } }
"""


def fastest(rows, model, way):
    """Return the row of the fastest mode, or None."""
    measured = [r for r in rows if r["model"] == model and r["way"] == way and r.get("ms")]
    return min(measured, key=lambda r: r["ms"], default=None)


def main():
    """Draw the chart."""
    rows = json.loads((ROOT / "benchmarks/results/models-h200.json").read_text())["rows"]
    parts, y = [], 58
    for panel, title in enumerate(("step time", "peak memory")):
        x = LABEL + panel * (PANEL + 50)
        parts.append(f'<text x="{x}" y="42" font-weight="600">{title}, relative to AMP</text>')
    for model, label in MODELS.items():
        base, top = fastest(rows, model, "AMP"), y
        for way, _, color in CONTENDERS:
            row = fastest(rows, model, way)
            if row is None:
                continue
            for panel, key in enumerate(("ms", "peak_bytes")):
                ratio = row[key] / base[key]
                x, width = LABEL + panel * (PANEL + 50), ratio * (PANEL - 90)
                shown = f"{row[key]:.0f} ms" if key == "ms" else f"{row[key] / 2**30:.1f} GiB"
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" '
                    f'fill="{color}"/>'
                    f'<text class="small" x="{x + width + 6:.1f}" y="{y + 12}">{shown}</text>'
                )
            y += BAR + GAP
        parts.append(f'<text x="0" y="{(top + y - GAP) / 2 + 5}">{label}</text>')
        y += GROUP
    x = 0
    for _, name, color in CONTENDERS:
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="20">{name}</text>')
        x += 40 + 7.2 * len(name)
    parts.append(
        f'<text class="small" x="0" y="{y + 4}">One H200, torch 2.11, the fastest of eager, '
        "compiled and graphed on each side. Shorter is better.</text>"
    )
    alt = "Step time and peak memory of four models, relative to torch AMP"
    body = "\n".join(parts)
    (Path(__file__).parent / "speed.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 14}" role="img" '
        f'aria-label="{alt}">\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    main()
