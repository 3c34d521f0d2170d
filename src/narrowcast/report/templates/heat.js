"use strict";
// The heat map: which rows there are, in which order, and the figure that plotly draws of them.
const heatMap = (() => {
  const EXACT = 1000, BROKEN = -1000, NOTHING = -7;
  const LOWEST = 0, HIGHEST = 70;
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const number = (n) => n.toLocaleString("en");

  // 0 dB is all noise. Well-scaled tensors reach 25 dB in e5m2 and 31 dB in e4m3: those look calm.
  // In bf16 they reach 55 dB and in fp16 73 dB; what is below that there has lost digits.
  const SCALES = {
    snr: {
      zmin: LOWEST, zmax: HIGHEST,
      colorscale: [[0, "@heat4"], [8 / 70, "@heat3"], [14 / 70, "@heat2"], [20 / 70, "@heat1"], [25 / 70, "@heat0"], [31 / 70, "@heat0"], [1, "@calm"]],
      tickvals: [0, 10, 20, 30, 40, 50, 60, 70], ticktext: ["≤ 0", "10", "20", "30", "40", "50", "60", "≥ 70"], title: "signal-to-noise ratio of the cast, dB",
      note: "Non-finite values are drawn as 0 dB. Tensors that were not cast or not measured are left empty.",
    },
    share: {
      zmin: NOTHING, zmax: 0,
      colorscale: [[0, "@heat0"], [0.1, "@heat0"], [0.15, "@heat1"], [0.5, "@heat2"], [0.75, "@heat3"], [1, "@heat4"]],
      tickvals: [NOTHING, -6, -4, -2, 0], ticktext: ["none", "10⁻⁶", "10⁻⁴", "1 %", "100 %"], title: "share of elements", note: "",
    },
  };

  const worse = (measure, a, b) => (a === null ? b : b === null ? a : (measure === "snr_db" ? a < b : a > b) ? a : b);

  function shown(measure, x) {
    if (x === null) return "not measured";
    if (measure === "snr_db")
      return x === EXACT ? "exact" : x === BROKEN ? "not finite" : `${x.toFixed(1)} dB`.replace("-", "−");
    if (x === 0) return "none";
    return x < 1e-3 ? x.toExponential(1).replace("-", "−") : `${(100 * x).toPrecision(3)} %`;
  }

  function height(measure, x) {
    if (x === null) return null;
    if (measure === "snr_db") return Math.min(HIGHEST, Math.max(LOWEST, x));
    return x === 0 ? NOTHING : Math.max(-6, Math.log10(x));
  }

  // One row per tensor, or one per module with the worst of its tensors in each column.
  function rowsOf(data, { measure, role }) {
    const columns = data.spans.length;
    const values = data.measures[measure];
    const whole = (i) => (Array.isArray(values[i]) ? values[i] : Array(columns).fill(values[i]));
    const wanted = data.rows.map((_, i) => i)
      .filter((i) => !role.startsWith("role:") || data.rows[i][1] === role.slice(5));
    const rows = new Map();
    for (const i of wanted) {
      const [module, name] = data.rows[i];
      const key = role === "each" ? JSON.stringify([module, name]) : module;
      const row = rows.get(key) ?? { module, role: role === "each" ? name : "", values: Array(columns).fill(null), from: Array(columns).fill(i) };
      whole(i).forEach((x, column) => {
        const chosen = worse(measure, row.values[column], x);
        if (chosen !== row.values[column]) [row.values[column], row.from[column]] = [chosen, i];
      });
      rows.set(key, row);
    }
    return [...rows.values()];
  }

  function badness(measure, row) {
    const seen = row.values.filter((x) => x !== null);
    if (!seen.length) return [Infinity, 0];
    const sign = measure === "snr_db" ? 1 : -1;
    return [sign * seen.reduce((a, b) => worse(measure, a, b)), sign * (seen.reduce((a, b) => a + b) / seen.length)];
  }

  function chosen(data, choice) {
    const rows = rowsOf(data, choice).map((row, place) => ({ ...row, place, bad: badness(choice.measure, row) }));
    const ranked = [...rows].sort((a, b) => a.bad[0] - b.bad[0] || a.bad[1] - b.bad[1] || a.place - b.place);
    const kept = choice.all ? ranked : ranked.slice(0, data.most);
    if (choice.order === "model") kept.sort((a, b) => a.place - b.place);
    return { rows: kept, of: rows.length };
  }

  // "blocks.3" of "blocks.3.mlp.up": rows of one block stand together.
  const block = (module) => module.match(/^(.*?\.\d+)\.(.+)$/)?.[1] ?? module.split(".")[0];

  const name = (row) => (row.module || "(the model itself)") + (row.role ? ` · ${row.role}` : "");

  // The part of a name that its block shares is quiet; too long a name loses its beginning.
  function label(row, longest, quiet) {
    const full = name(row);
    const shared = row.module.startsWith(`${block(row.module)}.`) ? block(row.module).length + 1 : 0;
    const cut = Math.max(0, full.length - longest);
    const head = (cut ? "…" : "") + full.slice(cut, Math.max(cut, shared));
    const tail = plain(full.slice(Math.max(cut, shared)));
    return head ? `<span style="color:${quiet}">${plain(head)}</span>${tail}` : tail;
  }

  function separators(rows, grouped) {
    if (!grouped) return [];
    return rows.flatMap((row, i) =>
      i && block(row.module) !== block(rows[i - 1].module)
        ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: i - 0.5, y1: i - 0.5, line: { color: "@paper", width: 4 } }]
        : []);
  }

  function cellText(data, choice, row, column) {
    const [module, role, format] = data.rows[row.from[column]];
    const [first, last] = data.spans[column];
    const when = first === last ? `step ${number(first)}` : `steps ${number(first)} – ${number(last)}`;
    return `${module || "(the model itself)"} · ${role} in ${format}, ${when}: ${shown(choice.measure, row.values[column])}`;
  }

  function figure(data, choice, { range, narrow, quiet }) {
    const { rows, of } = chosen(data, choice);
    const grouped = choice.order === "model";
    const most = narrow ? 18 : 40;
    const each = rows.length <= 30 ? 20 : rows.length <= 80 ? 15 : 12;
    const scale = SCALES[choice.measure === "snr_db" ? "snr" : "share"];
    const longest = Math.min(most, Math.max(...rows.map((row) => name(row).length), 4));
    const small = { color: "@quiet", size: each > 12 ? 11.5 : 10 };
    return {
      rows, of, note: scale.note,
      data: [{
        type: "heatmap", x: data.edges, y: rows.map((_, i) => i),
        z: rows.map((row) => row.values.map((x) => height(choice.measure, x))),
        text: rows.map((row) => row.values.map((_, column) => plain(cellText(data, choice, row, column)).replace(": ", "<br>"))),
        hovertemplate: "%{text}<extra></extra>", hoverongaps: false,
        zmin: scale.zmin, zmax: scale.zmax, colorscale: scale.colorscale, ygap: 1,
        colorbar: {
          orientation: "h", thickness: 9, len: narrow ? 1 : 0.45, x: 1, xanchor: "right", y: 1, yanchor: "bottom", ypad: 6, xpad: 0,
          outlinewidth: 0, tickvals: scale.tickvals, ticktext: scale.ticktext, tickfont: small, ticklen: 3, tickcolor: "@line",
          title: { text: scale.title, side: "top", font: small },
        },
      }],
      layout: {
        height: 88 + each * rows.length, meta: "step",
        margin: { l: Math.min(330, 16 + longest * (each > 12 ? 6.7 : 5.9)), r: 24, t: 4, b: 30 },
        paper_bgcolor: "@paper", plot_bgcolor: "@sunk", font: { color: "@ink", size: 13 },
        xaxis: { range, showgrid: false, zeroline: false, tickformat: ",d", ticks: "outside", ticklen: 4, tickcolor: "@line", tickfont: { color: "@quiet", size: 12 } },
        yaxis: {
          range: [rows.length - 0.5, -0.5], fixedrange: true, showgrid: false, zeroline: false, ticks: "",
          tickvals: rows.map((_, i) => i), ticktext: rows.map((row) => label(row, most, quiet)), tickfont: { color: "@ink", size: small.size },
        },
        shapes: separators(rows, grouped), hovermode: "closest",
        hoverlabel: { bgcolor: "@raised", bordercolor: "@line", font: { color: "@ink", size: 13 }, align: "left" },
      },
    };
  }

  return { figure, cellText };
})();
