"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const places = Object.keys(figures).map((name) => document.getElementById(name));
  const touch = matchMedia("(pointer: coarse)").matches;
  let printing = false;
  let following = false;
  let zoom = null;

  // "@name" stands for the custom property --name, so that charts wear the page's colours.
  function coloured(value, key) {
    if (typeof value === "string")
      return key.endsWith("color") && value.startsWith("@")
        ? getComputedStyle(root).getPropertyValue("--" + value.slice(1)).trim()
        : value;
    if (Array.isArray(value)) return key === "data" ? value.map((item) => coloured(item, "")) : value;
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, k)]));
  }

  // The values within the zoom, as a range of the vertical axis; powers of two keep theirs.
  function fitted(place, log) {
    const { data, layout } = figures[place.id];
    if (!zoom || layout.yaxis.tickvals) return null;
    const seen = data.filter((trace) => !trace.yaxis)
      .flatMap((trace) => trace.y.filter((y, i) => y !== null && trace.x[i] >= zoom[0] && trace.x[i] <= zoom[1]))
      .map((y) => (log ? Math.log10(y) : y));
    if (!seen.length) return null;
    const low = Math.min(...seen), high = Math.max(...seen);
    const spare = 0.06 * (high - low) || 0.05 * Math.abs(high) || 0.5;
    return [low - spare, high + spare];
  }

  function draw(place) {
    const { data, layout } = coloured(structuredClone(figures[place.id]), "");
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
    if (zoom) {
      layout.xaxis.range = [...zoom];
      layout.yaxis.range = fitted(place, layout.yaxis.type === "log") ?? layout.yaxis.range;
    }
    return Plotly.react(place, data, layout, { displayModeBar: false, responsive: true, showTips: false });
  }

  const drawAll = () => Promise.all(places.map(draw));

  // A zoom in one chart is a zoom in all: they share their steps.
  function follow(place, change) {
    if (following) return;
    const whole = figures[place.id].layout.xaxis.range;
    const range = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (range[0] === undefined && !change["xaxis.autorange"]) return;
    zoom = change["xaxis.autorange"] || range.every((x, i) => x === whole[i]) ? null : range;
    following = true;
    const chosen = Object.keys(change).some((key) => key.startsWith("yaxis."));
    const moved = places.map((other) => {
      if (!chosen || other !== place) return draw(other);
      return Plotly.relayout(other, { "xaxis.range": [...(zoom ?? whole)] });
    });
    Promise.all(moved).finally(() => { following = false; });
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

  const table = document.getElementById("layer-table");
  if (table) {
    sortable(table);
    filterable(table, document.getElementById("filter"), document.querySelector(".filter output"));
  }

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
