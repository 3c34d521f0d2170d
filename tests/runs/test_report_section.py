import pytest

from narrowcast.errors import ConfigError
from narrowcast.runs import ReportSection


@pytest.mark.parametrize(
    ("html", "named"),
    [
        ("<p>a</p><script>alert(1)</script>", "<script>"),
        ("<SCRIPT src=x>", "<script>"),
        ("<img src='https://example.org/a.png'>", "the address src"),
        ("<img src=//example.org/a.png>", "the address src"),
        ("<a href='javascript:alert(1)'>x</a>", "the address href"),
        ("<a href='data:text/html,x'>x</a>", "the address href"),
        ("<svg><use xlink:href='https://example.org#a'/></svg>", "the address xlink:href"),
        ("<p onclick='alert(1)'>x</p>", "the attribute onclick"),
        ("<p style='background: url(//example.org)'>x</p>", "an address in style"),
        ("<rect fill='URL (https://example.org#a)'/>", "an address in fill"),
        ("<iframe></iframe>", "<iframe>"),
        ("<p>a</p><img alt='", "an unfinished tag"),
        ("<p>a</p><!-- to be continued", "an unfinished tag"),
        ("<style>p { color: red }</style>", "<style>"),
        ("<meta http-equiv=refresh content='0; //example.org'>", "<meta>"),
    ],
)
def test_what_loads_or_runs_something_is_refused(html, named):
    with pytest.raises(ConfigError, match=named):
        ReportSection(title="Motifs", html=html)


@pytest.mark.parametrize(
    "html",
    [
        "<p>5 &lt; 6 &amp; https://example.org is only text</p>",
        "<img src='data:image/png;base64,AAAA' alt='a motif'>",
        "<svg viewBox='0 0 1 1'><rect width='1' height='1' fill='var(--series)'/></svg>",
        "<a href='#layers'>see the layers</a>",
    ],
)
def test_plain_markup_is_taken_as_it_is(html):
    assert ReportSection(title="Motifs", html=html).html == html
