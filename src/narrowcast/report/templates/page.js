"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const heat = JSON.parse(document.getElementById("heat-data").textContent);
  const named = (id) => document.getElementById(id);
  const places = [...Object.keys(figures), ...(heat ? ["heat"] : [])].map(named);
  const touch = matchMedia("(pointer: coarse)").matches;
  const zooms = {};
  const cursor = { row: 0, column: -1 };
  let printing = false;
  let following = false;

  // "@name" stands for the custom property --name, so that charts wear the page's colours.
  const NUMBERS = new Set(["x", "y", "z", "text", "tickvals", "ticktext"]);
  function coloured(value, key) {
    if (typeof value === "string")
      return /color(scale)?$/.test(key) && value.startsWith("@")
        ? getComputedStyle(root).getPropertyValue("--" + value.slice(1)).trim()
        : value;
    if (value === null || typeof value !== "object" || NUMBERS.has(key)) return value;
    if (Array.isArray(value)) return value.map((item) => coloured(item, key));
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, k)]));
  }

  function chosenHeat() {
    return {
      measure: document.querySelector("input[name=heat-measure]:checked").value,
      role: named("heat-role").value,
      order: named("heat-order").value,
      all: named("heat-all").checked,
    };
  }

  // The heat map is made anew for what its reader chose; all other figures come with the page.
  function figureOf(place) {
    if (place.id !== "heat") return figures[place.id];
    const edges = heat.edges;
    const range = figures.loss?.layout.xaxis.range ?? [edges[0], edges[edges.length - 1]];
    const quiet = getComputedStyle(root).getPropertyValue("--quiet").trim();
    const figure = heatMap.figure(heat, chosenHeat(), { range, quiet, narrow: !printing && innerWidth < 640 });
    const { rows, of, note } = figure;
    named("heat-more").hidden = of <= heat.most;
    named("heat-more").lastElementChild.textContent = `all ${of} rows`;
    const some = rows.length < of ? `The ${rows.length} worst of ${of} rows are shown.` : "";
    named("heat-note").textContent = [some, note].filter(Boolean).join(" ");
    if (cursor.column >= 0) {
      cursor.row = Math.min(cursor.row, rows.length - 1);
      figure.layout.shapes.push({
        type: "rect", x0: edges[cursor.column], x1: edges[cursor.column + 1], y0: cursor.row - 0.5, y1: cursor.row + 0.5,
        line: { color: "@ink", width: 2 },
      });
    }
    return figure;
  }

  // The values within the zoom, as a range of the vertical axis; powers of two keep theirs.
  function fitted({ data, layout }, zoom, log) {
    if (!zoom || layout.yaxis.tickvals) return null;
    const seen = data.filter((trace) => !trace.yaxis)
      .flatMap((trace) => trace.y.filter((y, i) => y !== null && trace.x[i] >= zoom[0] && trace.x[i] <= zoom[1]))
      .map((y) => (log ? Math.log10(y) : y));
    if (!seen.length) return null;
    const low = Math.min(...seen), high = Math.max(...seen);
    const spare = 0.06 * (high - low) || 0.05 * Math.abs(high) || 0.5;
    return [low - spare, high + spare];
  }

  const axisOf = (place) => (place.id === "heat" ? "step" : figures[place.id].layout.meta);

  function draw(place) {
    const figure = figureOf(place);
    const { data, layout } = coloured(structuredClone({ data: figure.data, layout: figure.layout }), "");
    // Plotly neither breaks nor cuts the text of a legend, and a phone would scroll sideways.
    if (!printing && innerWidth < 640)
      for (const trace of data) if (trace.name?.length > 40) trace.name = `${trace.name.slice(0, 39)}…`;
    layout.font.family = layout.hoverlabel.font.family = getComputedStyle(document.body).fontFamily;
    // On a touch screen a drag scrolls the page.
    layout.dragmode = touch ? false : "zoom";
    layout.autosize = !printing;
    // A sheet of A4 between its margins, or half of it.
    layout.width = printing ? (place.closest(".small") ? 310 : 660) : undefined;
    const button = document.querySelector(`button[data-chart="${place.id}"]`);
    if (button && button.getAttribute("aria-pressed") === "true") {
      layout.yaxis.type = "log";
      delete layout.yaxis.range;
    }
    const zoom = zooms[axisOf(place)];
    if (zoom) {
      layout.xaxis.range = [...zoom];
      layout.yaxis.range = fitted(figure, zoom, layout.yaxis.type === "log") ?? layout.yaxis.range;
    }
    return Plotly.react(place, data, layout, { displayModeBar: false, responsive: true, showTips: false });
  }

  const drawAll = () => Promise.all(places.map(draw));

  // A zoom in one chart is a zoom in all that share its axis.
  function follow(place, change) {
    if (following) return;
    const whole = figureOf(place).layout.xaxis.range;
    const range = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (range[0] === undefined && !change["xaxis.autorange"]) return;
    const zoom = change["xaxis.autorange"] || range.every((x, i) => x === whole[i]) ? null : range;
    zooms[axisOf(place)] = zoom;
    following = true;
    const chosen = Object.keys(change).some((key) => key.startsWith("yaxis."));
    const moved = places.filter((other) => axisOf(other) === axisOf(place)).map((other) => {
      if (!chosen || other !== place) return draw(other);
      return Plotly.relayout(other, { "xaxis.range": [...(zoom ?? whole)] });
    });
    Promise.all(moved).finally(() => { following = false; });
  }

  // Arrow keys move from cell to cell, and each cell is said in words.
  function read(row, column) {
    const { rows } = figureOf(named("heat"));
    cursor.row = Math.max(0, Math.min(rows.length - 1, row));
    cursor.column = Math.max(0, Math.min(heat.spans.length - 1, column));
    named("heat-cell").textContent = heatMap.cellText(heat, chosenHeat(), rows[cursor.row], cursor.column);
    draw(named("heat"));
  }

  function startHeat() {
    named("heat-controls").hidden = false;
    named("heat-controls").addEventListener("change", () => {
      cursor.column = -1;
      named("heat-cell").textContent = "";
      draw(named("heat"));
    });
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    named("heat-frame").addEventListener("keydown", (event) => {
      const move = moves[event.key];
      if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      if (cursor.column < 0) read(0, heat.spans.length - 1);
      else read(cursor.row + move[0], cursor.column + move[1]);
    });
  }

  async function unpack() {
    const packed = atob(document.getElementById("plotly").textContent);
    const bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  async function start() {
    await unpack();
    for (const place of places) place.replaceChildren();
    await drawAll();
    if (heat) startHeat();
    for (const place of places) place.on("plotly_relayout", (change) => follow(place, change));
    for (const button of document.querySelectorAll("button.switch")) {
      button.hidden = false;
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
        draw(document.getElementById(button.dataset.chart));
      });
    }
    for (const hint of document.querySelectorAll(".hint")) hint.hidden = touch;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
    root.dataset.drawn = "true";
  }

  function sortable(table) {
    const body = table.tBodies[0];
    const order = [...body.rows];
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    const worth = (row, column) => {
      const cell = row.cells[column];
      return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
    };
    const compare = (a, b) =>
      typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const next = { ascending: "descending", descending: "" }[head.getAttribute("aria-sort")] ?? "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        const sign = next === "descending" ? -1 : 1;
        if (next) head.setAttribute("aria-sort", next);
        const rows = next
          ? [...order].sort((a, b) => sign * compare(worth(a, column), worth(b, column)))
          : order;
        body.append(...rows);
      });
    });
  }

  function filterable(table, input, output) {
    input.parentElement.hidden = false;
    const rows = [...table.tBodies[0].rows];
    const texts = rows.map((row) => row.textContent.toLowerCase());
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      rows.forEach((row, i) => { row.hidden = !words.every((word) => texts[i].includes(word)); });
      const shown = rows.filter((row) => !row.hidden).length;
      output.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
    });
  }

  for (const table of document.querySelectorAll("table.sortable")) sortable(table);
  const layers = named("layer-table");
  if (layers) filterable(layers, named("filter"), document.querySelector(".filter output"));

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("section > details:not([open])")];
    for (const details of opened) details.open = true;
    root.classList.add("printing");
    printing = true;
    if (root.dataset.drawn) drawAll();
  });
  addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
    root.classList.remove("printing");
    printing = false;
    if (root.dataset.drawn) drawAll();
  });

  if (places.length)
    start().catch((error) => {
      root.dataset.failed = String(error);
      for (const note of document.querySelectorAll(".hint")) {
        note.hidden = false;
        note.textContent = "This browser could not draw the charts; in their place stands what they show.";
      }
    });
})();
