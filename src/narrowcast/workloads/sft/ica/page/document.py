"""A standalone HTML page of networks, an ablation, or both, with light and dark colours."""

from html import escape

from narrowcast.runs import ReportSection

STYLE = """
:root { color-scheme: light dark; --paper: #fdfdfb; --sunk: #f4f4f0; --ink: #1d2429;
  --quiet: #5b666e; --line: #b9bdbb; --grid: #ececea; --series: #1b5e8f; --group0: #1b5e8f;
  --group1: #b3500f; --group2: #1a6a45; --group3: #6a3f96; --group4: #a31f15; --group5: #7d5400;
  --group6: #96306f; --group7: #4a5760; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #14181b; --sunk: #1b2024;
  --ink: #e7e9e8; --quiet: #a0abb2; --line: #4a555b; --grid: #262d31; --series: #7fbdea;
  --group0: #7fbdea; --group1: #f2a45f; --group2: #7dd3a5; --group3: #cbaaf0; --group4: #ff9d92;
  --group5: #eec166; --group6: #f0a3d0; --group7: #b5c0c7; } }
body { margin: 0 auto; padding: 2.5rem clamp(1rem, 4vw, 2.5rem) 3rem; max-width: 74rem;
  background: var(--paper); color: var(--ink); font: 1rem/1.5 Inter, system-ui, sans-serif;
  font-variant-numeric: tabular-nums; }
h1 { font-size: 1.75rem; line-height: 1.25; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
h3 { font-size: .9375rem; margin: 1.5rem 0 .5rem; }
.note { color: var(--quiet); font-size: .875rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; }
th, td { padding: .25rem .875rem .25rem 0; text-align: left; border-bottom: 1px solid var(--grid); }
th { color: var(--quiet); font-weight: 500; } .number { text-align: right; }
.legend { display: flex; flex-wrap: wrap; gap: .375rem 1.5rem; padding: 0; list-style: none;
  font-size: .875rem; }
.swatch { display: inline-block; width: .75rem; height: .75rem; margin-right: .5rem;
  border-radius: .1875rem; vertical-align: -.0625rem; }
"""


def page(title: str, sections: list[ReportSection]) -> str:
    """Return a page of sections that loads no files and runs no scripts."""
    body = "\n".join(f"<h2>{escape(each.title)}</h2>\n{each.html}" for each in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} – narrowcast</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}
</body>
</html>
"""
