"use strict";
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const figures = JSON.parse(byId("figures").textContent);
  const touch = matchMedia("(pointer: coarse)").matches;
  const DRAW_MS = 1000, RETRY_MS = 2000, MOST_EVENTS = 200, MOST_SKIPS = 20, MOST_EVALS = 50;
  const RESTING_MS = 1500; // a label under the pointer is left alone this long
  const number = new Intl.NumberFormat("en-US");

  let lists, events, evals, head, frame;
  function forget() {
    lists = {};
    events = new Map();
    evals = [];
    head = frame = null;
  }
  forget();

  // Everything that comes from a run is set as text, never as markup.
  function element(name, text = "", className = "") {
    const made = document.createElement(name);
    if (className) made.className = className;
    made.textContent = text;
    return made;
  }
  const row = (...cells) => { const made = document.createElement("tr"); made.append(...cells); return made; };
  const escaped = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const span = (first, last) => (first === last ? number.format(first) : `${number.format(first)}–${number.format(last)}`);

  function coded(place, text) {
    place.replaceChildren(...text.split("`").map((part, i) => (i % 2 ? element("code", part) : part)));
  }

  // ---- the head, the tables

  function showHead() {
    const { state } = head;
    const badge = byId("state");
    badge.textContent = state.label;
    badge.className = `badge ${state.tone}${state.at_work ? " at-work" : ""}`;
    byId("began").textContent = head.began;
    byId("title").textContent = head.title;
    byId("description").textContent = head.description.slice(0, 1).toUpperCase() + head.description.slice(1);
    const advice = byId("advice");
    const damaged = head.damaged ? ` ${number.format(head.damaged)} lines of records.jsonl are damaged and left out.` : "";
    const words = (state.advice + damaged).trim();
    advice.hidden = !words;
    advice.className = `advice ${state.advice ? state.tone : "fair"}`;
    coded(advice, words);
    const percent = Math.floor(100 * head.share);
    byId("way").hidden = !head.progress;
    byId("progress").textContent = head.progress;
    byId("share").textContent = head.reading ? "reading …" : `${percent} %`;
    byId("track").setAttribute("aria-valuenow", String(percent));
    byId("track").firstElementChild.style.width = `${100 * head.share}%`;
    document.title = `${head.progress ? `${percent} % · ` : ""}${head.name} – narrowcast watch`;
    byId("facts").replaceChildren(...head.facts.map((fact) => {
      const item = document.createElement("div"), answer = document.createElement("dd");
      answer.append(element("strong", fact.value), element("small", fact.note));
      item.append(element("dt", fact.label), answer);
      return item;
    }));
    // What a run counts and what it is judged by is known from its head alone.
    for (const [name, title] of Object.entries(head.titles)) {
      const [trace] = figures[name].data;
      figures[name].title = title;
      document.querySelector(`[data-figure="${name}"] h3`).textContent = title;
      trace.name = escaped(title.toLowerCase());
      trace.hovertemplate = `${trace.name}: %{y:.4~g}<extra></extra>`;
    }
    byId("headline-note").textContent = head.better;
    byId("waiting").hidden = Boolean(head.progress);
  }

  const formats = { full: /^(fp32|tf32)/, half: /^(bf16|fp16)/, eight: /^(e4m3|e5m2|mxfp8)/, four: /^(e2m1|nvfp4)/ };
  function format(name) {
    const family = Object.keys(formats).find((key) => formats[key].test(name)) ?? "other";
    return element("span", name, `format ${family}`);
  }

  function eventRow(event, fresh) {
    const steps = element("td", span(event.first, event.last), "number");
    steps.dataset.label = event.times > 1 ? "steps" : "step";
    if (event.times > 1) steps.append(element("span", `${number.format(event.times)} times`, "kind"));
    const what = element("td", event.text, "wide");
    if (event.kind === "format") what.append(format(event.before), " → ", format(event.after));
    what.prepend(element("span", event.kind, "kind"));
    const where = document.createElement("td");
    if (event.module) where.append(element("code", event.module));
    if (event.role) where.append(element("span", event.role, "kind"));
    const made = row(steps, what, where, element("td", event.why, "wide"), element("td", event.action, "wide"));
    if (fresh) {
      made.className = "fresh";
      setTimeout(() => { made.className = ""; }, 3000);
    }
    return made;
  }

  function showEvents(news, fresh) {
    const keys = new Set(news.map((event) => event.key));
    for (const event of news) { events.delete(event.key); events.set(event.key, event); }
    while (events.size > MOST_EVENTS) events.delete(events.keys().next().value);
    const newest = [...events.values()].reverse();
    byId("events").replaceChildren(...newest.map((event) => eventRow(event, fresh && keys.has(event.key))));
  }

  function countEvents() {
    byId("no-events").hidden = events.size > 0;
    byId("events-region").hidden = !events.size;
    const more = events.size >= MOST_EVENTS ? `The newest ${events.size}, of ${number.format(head.findings)} findings and ${number.format(head.changes)} changes; all are in the report.` : "";
    byId("events-note").textContent = more;
  }

  function showSkips() {
    const marks = lists.skips ?? [];
    byId("no-skips").hidden = marks.length > 0;
    byId("skips-region").hidden = !marks.length;
    byId("skips").replaceChildren(...marks.slice(-MOST_SKIPS).reverse().map(([first, last, times, scale, why]) => {
      const steps = element("td", span(first, last), "number");
      if (times > 1) steps.append(element("span", `${number.format(times)} skipped`, "kind"));
      return row(steps, element("td", scale === null ? "–" : number.format(scale), "number"), element("td", why || "no reason recorded", "wide"));
    }));
    const shown = marks.slice(-MOST_SKIPS).reduce((sum, mark) => sum + mark[2], 0);
    byId("skips-note").textContent = shown < head.skipped ? `The last ${number.format(shown)} of ${number.format(head.skipped)}.` : "";
  }

  function showEvals() {
    byId("no-evals").hidden = evals.length > 0;
    byId("evals-region").hidden = !evals.length;
    const names = [...new Set(evals.flatMap(([, metrics]) => Object.keys(metrics)))];
    byId("metrics").replaceChildren(...["step", ...names].map((name) => {
      const cell = element("th", name.replaceAll("_", " "), "number");
      cell.scope = "col";
      return cell;
    }));
    byId("evals").replaceChildren(...[...evals].reverse().map(([step, metrics]) =>
      row(element("td", step, "number"), ...names.map((name) => element("td", metrics[name] ?? "–", "number")))));
  }

  // ---- the charts

  function coloured(value, key) {
    if (typeof value === "string")
      return key.endsWith("color") && value.startsWith("@")
        ? getComputedStyle(root).getPropertyValue("--" + value.slice(1)).trim()
        : value;
    if (Array.isArray(value)) return key === "data" ? value.map((item) => coloured(item, "")) : value;
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, k)]));
  }

  // A row is the mean of a stretch of steps, then its points: step, value, step, value …
  function points(rows = []) {
    const x = [], y = [];
    for (const bucket of rows)
      for (let i = 1; i < bucket.length; i += 2) { x.push(bucket[i]); y.push(bucket[i + 1]); }
    return { x, y };
  }

  function median(values) {
    const ordered = values.filter((y) => y !== null).sort((a, b) => a - b), n = ordered.length;
    return n ? (ordered[(n - 1) >> 1] + ordered[n >> 1]) / 2 : null;
  }

  // The median of a twenty-fifth of the run around each stretch, as the report draws it.
  function smoothed(rows = []) {
    const reach = Math.floor(rows.length / 50), means = rows.map((bucket) => bucket[0]);
    const at = rows.map((bucket) => (bucket[1] + bucket[bucket.length - 2]) / 2);
    return { x: at, y: means.map((_, i) => {
      const near = Math.min(reach, i, rows.length - 1 - i);
      return median(means.slice(i - near, i + near + 1));
    }) };
  }

  const skipText = ([first, last, times, , why]) => escaped(
    (first === last ? "skipped" : `${number.format(times)} skipped, up to step ${number.format(last)}`) + (why ? `: ${why}` : ""),
  ).replace(/(.{50,70}?) /g, "$1<br>");

  const fill = {
    loss(data, layout) {
      const rows = lists.loss, skips = lists.skips ?? [], changes = lists.changes ?? [];
      const smooth = (rows?.length ?? 0) >= 50;
      Object.assign(data[0], points(rows));
      if (!smooth) data[0].line.color = "@series";
      Object.assign(data[1], smooth ? smoothed(rows) : {});
      Object.assign(data[2], points(lists.evaluated), { name: "evaluated loss" });
      data[2].hovertemplate = `${data[2].name}: %{y:.4~g}<extra></extra>`;
      Object.assign(data[3], { x: skips.map((m) => m[0]), y: skips.map(() => 0), text: skips.map(skipText) });
      data[3].error_x.array = skips.map((m) => m[1] - m[0]);
      data[3].error_x.arrayminus = skips.map(() => 0);
      Object.assign(data[4], {
        x: changes.map((c) => c[0]),
        y: changes.map(() => 1),
        text: changes.map(([, times, text]) => escaped(text + (times > 1 ? ` and ${number.format(times - 1)} more` : ""))),
      });
      layout.shapes = changes.map(([step]) => ({
        type: "line", x0: step, x1: step, y0: 0, y1: 1, yref: "paper", layer: "below",
        line: { color: colour("eight"), width: 1, dash: "dot" },
      }));
      if (skips.length || changes.length) layout.yaxis.domain = [0.1, 1];
      else { delete layout.yaxis2; delete layout.xaxis.anchor; }
      if (frame?.loss && !logarithmic()) layout.yaxis.range = frame.loss;
      if (logarithmic()) layout.yaxis.type = "log";
      const gaps = data[0].y.filter((y) => y === null).length;
      const above = frame?.loss ? data[0].y.filter((y) => y !== null && y > frame.loss[1]).length : 0;
      const marked = changes.reduce((sum, change) => sum + change[1], 0);
      byId("loss-note").textContent = [
        marked < head.changes ? `The newest ${number.format(marked)} of ${number.format(head.changes)} changes of format are marked.` : "",
        gaps ? "The loss was not finite where the line has gaps." : "",
        above && !logarithmic() ? "Spikes reach above the frame." : "",
      ].join(" ").trim();
      return data.filter((trace) => trace.x?.length);
    },
    headline(data, layout) {
      Object.assign(data[0], points(lists.headline));
      if (head.ticks) {
        layout.yaxis.tickformat = head.ticks;
        data[0].hovertemplate = `${data[0].name}: %{y:${head.ticks}}<extra></extra>`;
      }
      return data;
    },
    parts(data) {
      partNames().forEach((name, i) => {
        const rows = lists[PART + name], shown = escaped(name.replaceAll("_", " "));
        Object.assign(data[i], rows.length >= 50 ? smoothed(rows) : points(rows), { name: shown });
        data[i].hovertemplate = `${shown}: %{y:.4~g}<extra></extra>`;
      });
      const drawn = data.filter((trace) => trace.x?.length);
      byId("parts-note").textContent = drawn.map((trace, i) => `${partNames()[i].replaceAll("_", " ")} ${course(trace)}`).join("; ");
      return drawn;
    },
    scale(data, layout) {
      const skips = (lists.skips ?? []).filter((m) => m[3] !== null && m[3] > 0);
      Object.assign(data[0], points(lists.scale));
      data[0].text = data[0].y.map((y) => (y === null ? "" : number.format(y)));
      Object.assign(data[1], { x: skips.map((m) => m[0]), y: skips.map((m) => m[3]), text: skips.map(skipText) });
      Object.assign(layout.yaxis, frame?.scale ?? { type: "log" });
      return data.filter((trace) => trace.x?.length);
    },
    memory(data) {
      Object.assign(data[0], points(lists.memory));
      const most = Math.max(...data[0].y), unit = most >= 10 * 2 ** 30 ? "GiB" : "MiB";
      data[0].y = data[0].y.map((y) => y && y / (unit === "GiB" ? 2 ** 30 : 2 ** 20));
      document.querySelector('[data-figure="memory"] h3').textContent = `Peak memory, ${unit}`;
      return data;
    },
    norm(data, layout) {
      Object.assign(data[0], points(lists.norm));
      const finite = data[0].y.filter((y) => y > 0);
      // More than two decades would press most norms onto the axis.
      if (finite.length === data[0].y.filter((y) => y !== null).length && Math.max(...finite) > 100 * Math.min(...finite))
        layout.yaxis.type = "log";
      return withCourse("norm", data);
    },
    lost(data) {
      Object.assign(data[0], points(lists.lost));
      return withCourse("lost", data);
    },
    speed(data) {
      Object.assign(data[0], points(lists.speed));
      return withCourse("speed", data);
    },
  };
  const PART = "part:";
  const partNames = () => Object.keys(lists).filter((name) => name.startsWith(PART) && lists[name].length).map((name) => name.slice(PART.length));
  const plain = (name) => (data) => { Object.assign(data[0], points(lists[name])); return data; };

  // What is noise from step to step is drawn faintly, with its course over it.
  function withCourse(name, data) {
    if ((lists[name]?.length ?? 0) < 50) return data;
    const course = structuredClone(data[0]);
    Object.assign(course, smoothed(lists[name]), { name: `${course.name}, smoothed` });
    course.hovertemplate = "smoothed: %{y:.4~g}<extra></extra>";
    data[0].line.color = "@faint";
    return [data[0], course];
  }

  const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const logarithmic = () => document.querySelector("button.switch").getAttribute("aria-pressed") === "true";

  let zoom = null, following = false, pressed = false, moved = -Infinity, whole = [0, 1];

  function draw(place) {
    const figure = structuredClone(figures[place.id]);
    const { layout } = figure;
    const data = coloured({ data: (fill[place.id] ?? plain(place.id))(figure.data, layout) }, "").data;
    for (const trace of data)
      if (trace.x.length === 1 && trace.mode === "lines") trace.mode = "markers";
    const coats = coloured(layout, "");
    coats.font.family = coats.hoverlabel.font.family = getComputedStyle(document.body).fontFamily;
    coats.dragmode = touch ? false : "zoom"; // on a touch screen a drag scrolls the page
    coats.xaxis.range = [...(zoom ?? whole)];
    if (whole[1] - whole[0] < 10) coats.xaxis.dtick = 1; else delete coats.xaxis.dtick;
    if (zoom) {
      const fitted = fit(data, coats.yaxis);
      if (fitted) coats.yaxis.range = fitted;
    }
    place.setAttribute("aria-label", described(place.id, data));
    return Plotly.react(place, data, coats, { displayModeBar: false, responsive: true, showTips: false });
  }

  // The values within the zoom, as a range of the vertical axis; powers of two keep theirs.
  function fit(data, axis) {
    if (axis.tickvals) return null;
    let low = Infinity, high = -Infinity;
    for (const trace of data) {
      if (trace.yaxis) continue;
      trace.x.forEach((x, i) => {
        const y = axis.type === "log" ? Math.log10(trace.y[i]) : trace.y[i];
        if (trace.y[i] === null || x < zoom[0] || x > zoom[1] || !Number.isFinite(y)) return;
        low = Math.min(low, y);
        high = Math.max(high, y);
      });
    }
    if (low > high) return null;
    const spare = 0.06 * (high - low) || 0.05 * Math.abs(high) || 0.5;
    return [low - spare, high + spare];
  }

  function course(trace) {
    const finite = trace?.y.filter((y) => y !== null) ?? [];
    return finite.length ? `${+finite[0].toPrecision(4)} at the start, ${+finite.at(-1).toPrecision(4)} at the end` : "";
  }

  function described(name, data) {
    const title = figures[name].title;
    if (name === "parts") return `${title} over steps: ${byId("parts-note").textContent}.`;
    return course(data[0]) ? `${title} over steps: ${course(data[0])}.` : title;
  }

  function drawable() {
    return Object.keys(figures).filter((name) =>
      name === "parts" ? partNames().length : name === "scale" ? head.scaled && lists.scale?.length : (lists[name] ?? []).some((bucket) => bucket[0] !== null));
  }

  function drawAll() {
    const first = lists.loss?.[0]?.[1] ?? 0, rows = lists.loss ?? [];
    const last = rows.length ? rows.at(-1).at(-2) : 1;
    const spare = Math.max(1, last - first) * 0.01;
    whole = [first - spare, last + spare];
    const names = drawable();
    byId("hint").hidden = touch || !names.length;
    // All take their places first: a chart is as wide as its place.
    for (const name of Object.keys(figures)) byId(name).parentElement.hidden = !names.includes(name);
    return names.reduce((before, name) => before.then(() => drawOne(byId(name))), Promise.resolve())
      .then(() => { root.dataset.drawn = String(Number(root.dataset.drawn ?? 0) + 1); });
  }

  // One chart after the other, with a breath between them, so that the page answers meanwhile.
  async function drawOne(place) {
    await draw(place);
    if (!place.dataset.heard) {
      place.dataset.heard = "true";
      place.on("plotly_relayout", (change) => follow(place, change));
      await new Promise((resolve) => { setTimeout(resolve); });
    }
  }

  // A zoom in one chart is a zoom in all: they share their steps.
  function follow(place, change) {
    if (following) return;
    const range = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (range[0] === undefined && !change["xaxis.autorange"]) return;
    zoom = change["xaxis.autorange"] || range.every((x, i) => x === whole[i]) ? null : range;
    following = true;
    drawAll().finally(() => { following = false; });
  }

  let waiting = null;
  function schedule() {
    waiting ??= setTimeout(() => {
      waiting = null;
      if (document.hidden || typeof Plotly === "undefined" || !head) return;
      // A redraw would take away what the reader is pointing at, or drop a zoom half drawn.
      if (pressed || performance.now() < moved + RESTING_MS) return schedule();
      following = true;
      drawAll().finally(() => { following = false; });
    }, root.dataset.drawn ? DRAW_MS : 0);
  }

  // ---- what the server tells

  function take(news) {
    if (news.reset) forget();
    const fresh = !news.reset;
    if (news.head) head = news.head;
    if (news.frame) frame = news.frame;
    for (const [name, [at, rows]] of Object.entries(news.lists ?? {})) {
      lists[name] ??= [];
      lists[name].length = at;
      for (const item of rows) lists[name].push(item);
    }
    if (news.head) showHead();
    if (news.reset || news.events) showEvents(news.events ?? [], fresh);
    countEvents();
    if (news.reset || news.lists?.skips || news.head) showSkips();
    if (news.reset || news.evals) {
      evals.push(...(news.evals ?? []));
      evals.splice(0, evals.length - MOST_EVALS);
      showEvals();
    }
    if (news.reset || news.lists || news.frame) schedule();
    loadPlotly();
  }

  // Plotly takes a second to start; what can be read without it is shown before.
  let asked = false;
  function loadPlotly() {
    if (asked) return;
    asked = true;
    const script = document.createElement("script");
    script.src = document.querySelector('link[rel="preload"]').href;
    script.onload = schedule;
    requestAnimationFrame(() => setTimeout(() => document.head.append(script)));
  }

  let source = null, retry = null;
  function connected(well) {
    byId("out-of-reach").hidden = well;
    document.body.classList.toggle("stale", !well);
    if (!well) {
      byId("state").textContent = "Out of reach";
      byId("state").className = "badge fair";
    }
  }

  function listen() {
    clearTimeout(retry);
    source?.close();
    source = null;
    // A browser grants few connections a server; a page that nobody sees gives its own back.
    if (document.hidden) return;
    source = new EventSource("/events");
    source.onopen = () => connected(true);
    source.onmessage = (message) => take(JSON.parse(message.data));
    source.onerror = () => {
      source.close();
      connected(false);
      retry = setTimeout(listen, RETRY_MS);
    };
  }

  document.querySelector("button.switch").addEventListener("click", (event) => {
    const button = event.currentTarget;
    button.setAttribute("aria-pressed", String(!logarithmic()));
    drawAll();
  });
  addEventListener("pointerdown", (event) => { pressed = Boolean(event.target.closest(".chart")); });
  addEventListener("pointerup", () => { pressed = false; });
  addEventListener("pointercancel", () => { pressed = false; });
  addEventListener("pointermove", (event) => { if (event.target.closest?.(".chart")) moved = performance.now(); });
  document.addEventListener("visibilitychange", listen);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (head) drawAll(); });
  addEventListener("pagehide", () => { source?.close(); });
  addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
  listen();
})();
